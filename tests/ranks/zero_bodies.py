"""What the ranks of the tests of sharded data parallelism run."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn

from isotron.core.layout import Placed, Rule, shard
from isotron.core.mesh import Mesh
from isotron.core.parallel.buckets import Classes
from isotron.core.parallel.data import Flat, Partial
from isotron.core.parallel.shards import Bucket, Sharding, sharing
from isotron.train.verify import Case, microbatches
from tests.ranks.bodies import build, steps_of


def trained_bits(case: Case) -> list[tuple[str, bytes]]:
    """Everything that this rank keeps after training, as bytes."""
    model = build(case)
    steps_of(model, case)
    return sorted(
        (f"{v.placed.name} {v.box}", v.weight.numpy().tobytes())
        for stage in model.stages.values()
        for v in stage.flat.views()
    )


def gathered_peaks(case: Case) -> tuple[int, dict[str, int], int]:
    """Most bytes of gathered weights at once in a step and an evaluation, bytes of each unit, and bytes left after."""
    model = build(case)
    live: dict[int, int] = {}
    most = 0
    acquire, free = Bucket.acquire, Bucket.free

    def acquired(self: Bucket) -> None:
        nonlocal most
        acquire(self)
        live[id(self)] = self.whole.untyped_storage().nbytes()
        most = max(most, sum(live.values()))

    def freed(self: Bucket) -> None:
        free(self)
        live[id(self)] = self.whole.untyped_storage().nbytes()

    with patch.object(Bucket, "acquire", acquired), patch.object(Bucket, "free", freed):
        batches = microbatches(case, 0, model.mesh.group("dp"))
        model.forward_backward(batches, 1.0)
        model.evaluate(batches)
    (stage,) = model.stages.values()
    assert stage.units is not None
    units = {
        name: sum(b.whole.numel() * b.whole.element_size() for b in unit.buckets)
        for name, unit in stage.units.units.items()
    }
    return most, units, sum(live.values())


def open_gradients(case: Case) -> tuple[int, int, int]:
    """Most elements of unreduced gradients at once (the tied embedding, one that fills, those under way), of the
    largest bucket, and of all.
    """
    model = build(case)
    (stage,) = model.stages.values()
    most = 0
    opened, start = Bucket._opened, Flat._start
    flying: list[int] = []

    def open_now() -> int:
        return sum(b.stop - b.start for b in stage.flat.buckets if b.is_open)

    def watched(self: Bucket) -> torch.Tensor:
        nonlocal most
        full = opened(self)
        most = max(most, open_now() + sum(flying[-len(stage.flat._flying) :] if stage.flat._flying else []))
        return full

    def started(self: Flat, bucket: Bucket) -> None:
        flying.append(bucket.stop - bucket.start)
        start(self, bucket)

    with patch.object(Bucket, "_opened", watched), patch.object(Flat, "_start", started):
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1.0)
    sizes = [b.stop - b.start for b in stage.flat.buckets]
    return most, max(sizes), sum(sizes)


def two_groups(zero: int) -> tuple[dict[str, float], dict[str, int]]:
    """A buffer with two classes: one summed over all four ranks, one over pairs. Sums, and elements stepped here."""
    rank = dist.get_rank()
    mesh = Mesh(rank, dp=4)
    ranks = mesh.group("dp").ranks
    pair = ranks[rank // 2 * 2 : rank // 2 * 2 + 2]
    shape = (4, 6)
    module = nn.ParameterDict({"dense": torch.empty(0), "expert": torch.empty(0)})
    rules = {n: Rule(n, shape) for n in module}
    placed = {n: Placed(n, r, shard(r, mesh.coordinate, mesh.sizes)) for n, r in rules.items()}
    groups = {
        "dense": sharing(ranks, rank, mesh.group_of, 4),
        "expert": sharing(pair, rank, mesh.group_of, 2),
    }
    plan = Sharding(zero, groups, 1000, Classes(group_of=lambda p: p.name))
    device = torch.device("cpu")
    flat = Flat(dict(module.items()), placed, plan, torch.float32, device, lambda *_: None, Partial(), None)  # type: ignore[arg-type]
    flat.begin()
    for sink in flat.sinks.values():
        sink.add(torch.full(shape, float(rank)))
    flat.finish_reduce()
    sums: dict[str, Any] = {v.placed.name: float(v.grad[0]) for v in flat.views()}
    return {**sums, "pair": float(sum(pair))}, {v.placed.name: v.box.size for v in flat.views()}
