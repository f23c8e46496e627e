"""Modules that use other parameters on each rank and in each backward: what has no gradient counts as zero."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import isotron
from isotron.core import shard

WIDTH, STEPS, RANKS = 6, 4, 2


class Block(nn.Module):
    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32 if narrow else torch.float64))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.tanh(self.a(x)) * self.gain
        return x + self.b(x) if extra else x


class Choosy(nn.Module):
    """`wanted`: which parts a forward takes."""

    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(narrow) for _ in range(3))
        self.other, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: list[bool]) -> Tensor:
        x = self.first(x)
        for block, extra in zip(self.blocks, wanted, strict=False):
            x = block(x, extra)
        return self.last(torch.tanh(self.other(x)) if wanted[3] else x).square().mean()


def net(narrow: bool) -> Choosy:
    torch.manual_seed(5)
    made = Choosy(narrow).double()
    for block in made.blocks if narrow else ():
        block.gain.data = block.gain.data.float()
    return made


def backwards(step: int, rank: int, uneven: bool) -> Iterator[tuple[Tensor, list[bool]]]:
    """What a rank does in a step: one or two backwards; uneven ones, none to two."""
    draw = random.Random(100 * step + rank)
    for i in range((step + 2 * rank) % 3 if uneven else 1 + step % 2):
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        yield x, [draw.random() < 0.5 for _ in range(4)]


def alone(narrow: bool, uneven: bool) -> dict[str, Tensor]:
    module = net(narrow)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            for x, wanted in backwards(step, rank, uneven):
                (module(x, wanted) / RANKS).backward()
        optimizer.step()
    return {n: p.detach() for n, p in module.named_parameters()}


def sharded(zero: int, bucket_size: int, narrow: bool, uneven: bool) -> dict[str, Tensor]:
    module, rank = net(narrow), dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = shard(module, optimizer, zero=zero, bucket_size=bucket_size)
    for step in range(STEPS):
        every = list(backwards(step, rank, uneven))
        for i, (x, wanted) in enumerate(every):
            if i == len(every) - 1 and step != 2:
                held.last_backward()
            module(x, wanted).backward()
        optimizer.step()
    with held.gathered() as whole:
        return {n: p.detach().clone() for n, p in whole.named_parameters()}


def engined(zero: int, bucket_size: int) -> dict[str, Tensor]:
    module = net(False)
    stage = {"stage": zero, "reduce_bucket_size": bucket_size}
    cfg = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1, "zero_optimization": stage}
    engine, *_ = isotron.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=cfg)
    for step in range(STEPS):
        x, wanted = next(backwards(step, dist.get_rank(), False))
        engine.backward(engine(x, wanted))
        engine.step()
    with engine.gathered() as whole:
        return {n: p.detach().clone() for n, p in whole.named_parameters()}


def near(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in want.items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bucket_size", [30, 10**6])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_that_use_other_parameters(
    ranks: Callable[..., list[Any]], zero: int, bucket_size: int, narrow: bool
) -> None:
    uneven = zero < 3  # under ZeRO-3 every rank runs every unit as often
    want = alone(narrow, uneven)
    for found in ranks(RANKS, sharded, zero, bucket_size, narrow, uneven):
        near(found, want, 1e-5 if narrow else 1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_engine_whose_ranks_do(ranks: Callable[..., list[Any]], zero: int) -> None:
    module = net(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            x, wanted = next(backwards(step, rank, False))
            (module(x, wanted) / RANKS).backward()
        optimizer.step()
    want = {n: p.detach() for n, p in module.named_parameters()}
    for found in ranks(RANKS, engined, zero, 30):
        near(found, want, 1e-12)


class Backwards(nn.Module):
    """Runs its units from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for unit in reversed(self.units):
            x = torch.tanh(unit(x))
        return x.square().mean()


def sums_of_a_reversed_list() -> tuple[int, int, int]:
    """Sums of a backward, buckets, and the most that were open at once."""
    torch.manual_seed(5)
    module = Backwards()
    held = shard(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3, bucket_size=30)
    buckets = [b for flat in held.flats for b in flat.buckets]
    started, most = 0, 0
    for flat in held.flats:

        def start(bucket: Any, real: Callable[[Any], None] = flat.start) -> None:
            nonlocal started, most
            most = max(most, sum(b.is_open for b in buckets))
            started += 1
            real(bucket)

        flat.start = start  # type: ignore[method-assign]
    module(torch.ones(2, WIDTH)).backward()
    held.finish()
    return started, len(buckets), most


def test_units_are_summed_as_the_backward_comes_by_them(ranks: Callable[..., list[Any]]) -> None:
    for started, buckets, most in ranks(RANKS, sums_of_a_reversed_list):
        assert started == buckets
        assert most <= 4  # of two units: a weight and a bias each


def forgetting(zero: int) -> Tensor:
    """A first step that the second rank has no part in is forgotten before any sum; the second is taken."""
    module, rank = net(False), dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = shard(module, optimizer, zero=zero)
    for step in range(2):
        x, wanted = next(backwards(0, rank, False))
        if step or rank == 0:
            module(x, wanted).backward()
        held.zero_grad() if step == 0 else optimizer.step()
    with held.gathered() as whole:
        return torch.cat([p.detach().flatten() for p in whole.parameters()])


@pytest.mark.parametrize("zero", [0, 1])
def test_a_backward_is_forgotten_where_no_sum_has_begun(ranks: Callable[..., list[Any]], zero: int) -> None:
    module = net(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for rank in range(RANKS):
        x, wanted = next(backwards(0, rank, False))
        (module(x, wanted) / RANKS).backward()
    optimizer.step()
    want = torch.cat([p.detach().flatten() for p in module.parameters()])
    for found in ranks(RANKS, forgetting, zero):
        assert torch.allclose(found, want, rtol=1e-12, atol=1e-12)
