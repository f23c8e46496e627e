"""What stages hand on: several named tensors of different shapes, types and lengths, under every kind of table.

An encoder over one sequence and a decoder over another that attends to it, as stages: the encoder's hand on one tensor,
the decoder's three, of which one passes through them all and collects gradients from each.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from isotron.core.mesh import Mesh
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.pipeline.runtime import Runtime

Ranks = Callable[..., list[Any]]
LENGTHS = ((5, 7), (16, 2), (9, 3), (1, 4))  # of the microbatches: of the encoder's and the decoder's sequence
STEPS = (4, 1)  # microbatches of each step
D = 4


class EncoderDecoder(nn.Module):
    """Stage `number`: a block of the encoder in the first half, of the decoder in the second."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        start = torch.arange(float(D * D), dtype=torch.float64).view(D, D)
        self.w = nn.Parameter(torch.sin(start + number))
        self.v = nn.Parameter(torch.cos(start + number))
        self.number, self.middle, self.last, self.forget = number, stages // 2, number == stages - 1, ""

    def forward(self, batch: Any, boundary: dict[str, Tensor], weight: float) -> tuple[Any, Any]:
        if self.number < self.middle:
            x = embedded(batch.source) if self.number == 0 else boundary["memory"]
            made = {"memory": torch.tanh(x @ self.w) + x.mean(1, keepdim=True) @ self.v}
            return {name: t for name, t in made.items() if name != self.forget}, {}
        if self.number == self.middle:
            boundary = {**boundary, "hidden": embedded(batch.tokens), "marks": batch.tokens % 3}
        x, memory, marks = boundary["hidden"], boundary["memory"], boundary["marks"]
        x = torch.tanh(x @ self.w + torch.softmax(x @ self.v @ memory.mT, -1) @ memory)
        if self.last:
            return {}, {"loss": ((x * marks[..., None]).sum(), weight)}
        return {"hidden": x, "memory": memory, "marks": (marks + 1) % 3}, {}


def embedded(ids: Tensor) -> Tensor:
    return torch.cos(ids[..., None] * torch.arange(1.0, D + 1, dtype=torch.float64))


def shapes_of(half: int) -> Any:
    def shapes(batch: Any, behind: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        (b, source), target = batch.source.shape, batch.tokens.shape[1]
        found: dict[str, Any] = {"memory": ((b, source, D), torch.float64)}
        if behind >= half:
            found |= {"hidden": ((b, target, D), torch.float64), "marks": ((b, target), torch.int64)}
        return found

    return shapes


def batches_of(count: int) -> list[Any]:
    rows = [[torch.arange(2 * n).view(2, n) * 7 % 11 for n in both] for both in LENGTHS[:count]]
    return [SimpleNamespace(source=s, tokens=t, shape=tuple(t.shape)) for s, t in rows]


def whole(stages: int, count: int) -> tuple[float, list[list[Tensor]]]:
    """The loss and every stage's gradients without a runtime."""
    modules = [EncoderDecoder(s, stages) for s in range(stages)]
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches_of(count):
        boundary: dict[str, Tensor] = {}
        for module in modules:
            boundary, terms = module(batch, boundary, 1.0)
        total = total + terms["loss"][0]
    total.backward()
    return float(total.detach()), [[p.grad for p in module.parameters()] for module in modules]  # type: ignore[misc]


def run_steps(name: str, p: int, v: int, forget: str = "") -> list[tuple[float, dict[int, list[Tensor]]]]:
    """On one of p ranks, for each step: the loss, if it has it, and the gradients of its stages."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = {}
    for s in plan(name, p, 1, v).stages_of(rank):
        module = EncoderDecoder(s, p * v)
        module.forget = forget
        flat = SimpleNamespace(watch=lambda last: None, start_reduce=lambda last: None)
        shapes = shapes_of(module.middle)
        own[s] = SimpleNamespace(module=module, flat=flat, sinks=[], boundary_shapes=shapes, settle=lambda: None)
    runtime = Runtime(own, Mesh(rank, pp=p).group("pp"), overlap=False)
    found = []
    for count in STEPS:
        terms = runtime.run(plan(name, p, count, v), batches_of(count), 1.0)
        gradients = {s: [q.grad for q in stage.module.parameters()] for s, stage in own.items()}
        for stage in own.values():
            stage.module.zero_grad()
        found.append((float(terms.get("loss", 0.0)), gradients))
    return found


def check(ranks: Ranks, name: str, p: int) -> None:
    v = 1 if SCHEDULES[name].per_rank == "one" else 2
    found = ranks(p, run_steps, name, p, v)
    for step, count in enumerate(STEPS):
        loss, gradients = whole(p * v, count)
        assert sum(each[step][0] for each in found) == pytest.approx(loss, rel=1e-12)
        mine = {s: grads for each in found for s, grads in each[step][1].items()}
        assert sorted(mine) == list(range(p * v))
        for s, wanted in enumerate(gradients):
            for a, b in zip(mine[s], wanted, strict=True):
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), (name, step, s)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_encoder_and_a_decoder_on_four_ranks(ranks: Ranks, name: str) -> None:
    """Four microbatches of any lengths, then a step of one."""
    check(ranks, name, 4)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved"])
def test_an_encoder_and_a_decoder_on_two_ranks(ranks: Ranks, name: str) -> None:
    check(ranks, name, 2)


def test_a_stage_that_forgets_a_tensor_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 hands on \{\}, its neighbours agreed on .*memory"):
        run_steps("1f1b", 1, 4, forget="memory")
