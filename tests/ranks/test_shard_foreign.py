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
