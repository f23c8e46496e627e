"""`isotron.core.shard` on a model of transformers: the numbers of one process, its weights, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from examples.shard_transformers import train
from isotron.core import shard
from isotron.core.errors import Refused
from isotron.core.layout import Box


@pytest.mark.parametrize(("zero", "checkpointing"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_a_transformers_model_trains_as_on_one_process(
    ranks: Callable[..., list[Any]], zero: int, checkpointing: bool
) -> None:
    alone = train(0)
    for found in ranks(2, train, zero, 4, checkpointing, timeout=120):
        assert found == pytest.approx(alone, rel=1e-9)


def whole(zero: int) -> tuple[int, list[float]]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    module[0].bias.requires_grad_(False)
    sharded = shard(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, units=("0", "2"))
    module(torch.ones(2, 4)).sum().backward()
    sharded.optimizer.step()
    kept = sum(flat.weights.numel() for flat in sharded.flats)
    with sharded.gathered() as full:
        return kept, [float(p.sum()) for p in full.state_dict().values()]


def test_weights_are_gathered_on_request(ranks: Callable[..., list[Any]]) -> None:
    size, want = whole(0)
    found = ranks(2, whole, 3)
    assert sum(kept for kept, _ in found) == size
    for _, sums in found:
        assert sums == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "says"), [({"zero": 4}, "zero=3"), ({"shard_size": 3}, "shard_size=0"), ({"meta": True}, "on the CPU")]
)
def test_refused(change: dict[str, Any], says: str) -> None:
    with torch.device("meta" if change.pop("meta", False) else "cpu"):
        module = nn.Linear(2, 2)
    with pytest.raises(Refused, match=says):
        shard(module, torch.optim.SGD(module.parameters()), **change)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(Refused, match="a new optimizer"):
        shard(module, optimizer)


class Tensors:
    """A source of tensors that counts what is read of it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.elements = tensors, 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        self.elements += out.numel()
        out.copy_(self.tensors[name][box.slices()])


def made() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return module


def read_from_source() -> tuple[int, list[tuple[str, float]]]:
    torch.manual_seed(4)
    source = Tensors({n: t + 0.5 for n, t in made().state_dict().items() if t.is_floating_point()})
    source.tensors["1.num_batches_tracked"] = torch.tensor(7)
    with torch.device("meta"):
        module = made()
    sharded = shard(module, None, zero=3, units=("0", "2"), values=source)
    with sharded.gathered() as full:
        same = [(n, bool(torch.equal(t, source.tensors[n]))) for n, t in full.state_dict().items()]
    return source.elements, same


def test_a_module_on_the_meta_device_reads_its_own_rows(ranks: Callable[..., list[Any]]) -> None:
    whole = sum(t.numel() for t in made().state_dict().values())
    buffers = 13
    found = ranks(2, read_from_source)
    assert all(same for _, names in found for _, same in names)
    assert sum(elements for elements, _ in found) == whole + buffers  # parameters once, buffers on both


def test_a_source_without_what_is_needed_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    source = Tensors({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    with pytest.raises(Refused, match="no tensor of the right shape for weight"):
        shard(module, None, values=source)
