"""What the ranks of the tests of sharded data parallelism run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn

from isotron.config.schema import RunConfig
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.save import save_checkpoint
from isotron.core.checkpoint.weights import load_weights
from isotron.core.engine.shard import shard as shard_module
from isotron.core.layout import Placed, Rule, shard
from isotron.core.mesh import AXES, Mesh
from isotron.core.optim import hosted
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.optimizer import Optimizer
from isotron.core.optim.restore import load_slots
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.buckets import Classes
from isotron.core.parallel.data import Flat, Partial
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.shards import Bucket, Sharding, sharing
from isotron.core.precision.scaler import LossScaler
from isotron.train.state import TrainState, saved_tensors
from isotron.train.step import train_step
from isotron.train.verify import Case, _assemble, microbatches
from tests.live import Gathered, Live, Noted
from tests.ranks.bodies import build, steps_of

SCHEDULE = ScheduleConfig(lr=1e-2, lr_decay_style="constant")


def trained_bits(case: Case) -> list[tuple[str, bytes]]:
    """Everything that this rank keeps after training, as bytes."""
    model = build(case)
    steps_of(model, case)
    return sorted(
        (f"{v.placed.name} {v.box}", v.weight.numpy().tobytes())
        for stage in model.stages.values()
        for v in stage.flat.views()
    )


def train(model: ParallelModel, optimizer: Optimizer, case: Case) -> None:
    """The case's steps."""
    for step in range(case.steps):
        batches = microbatches(case, step, model.mesh.group("dp"))
        train_step(model, optimizer, SCHEDULE, batches)
    model.wait_weights()


@dataclass
class Offloaded:
    """Everything that this rank keeps after training, bytes of optimizer state in all and on the host, groups, and
    whether weights are in a file.
    """

    bits: list[tuple[str, bytes]]
    all: int
    host: int
    groups: int
    filed: bool


def offloaded_bits(cases: list[Case]) -> list[Offloaded]:
    """Three steps of each case, in groups that are smaller than the model."""
    found = []
    for case in cases:
        model = build(case)
        with patch.object(hosted, "GROUP", 2000):
            optimizer = make_optimizer(model, case.optim)
        train(model, optimizer, case)
        state = [(s.name, s.kept.stored()) for s in optimizer.slots()]
        held = [(v.placed.name, v.weight) for stage in model.stages.values() for v in stage.flat.views()]
        bits = [(n, t.contiguous().view(torch.uint8).numpy().tobytes()) for n, t in (*state, *held)]
        groups = sum(map(len, optimizer._groups.values()))
        filed = all(stage.flat._disk is not None for stage in model.stages.values())
        found.append(Offloaded(bits, optimizer.nbytes(), optimizer.nbytes(host=True), groups, filed))
    return found


def states_of_stages(cases: list[Case], directory: str) -> list[dict[str, bytes]]:
    """Weights, masters and moments after the first case's training, and as every other case reads them, on rank 0."""
    found: list[dict[str, bytes]] = []
    for case in cases:
        model = build(case)
        optimizer = make_optimizer(model, case.optim)
        state = TrainState(RunConfig(), model, optimizer, LossScaler(1.0, dynamic=False))
        if not found:
            train(model, optimizer, case)
            save_checkpoint(Path(directory), 1, saved_tensors(state), {}, state.ranks)
        else:
            source = Source(Path(directory) / "step_00000001")
            load_weights(model, source)
            load_slots(optimizer, source)
            source.close()
        parts = [(s.name, s.global_shape, s.pieces) for s in saved_tensors(state)]
        whole = _assemble(parts, model.mesh.group(*AXES))
        found.append({name: tensor.numpy().tobytes() for name, tensor in whole.items()})
    return found


def gathered_peaks(case: Case) -> tuple[int, dict[str, int], int]:
    """Most bytes of gathered weights at any operation of a step and an evaluation, bytes of each unit, and bytes left
    after.
    """
    model = build(case)
    (stage,) = model.stages.values()
    assert stage.units is not None
    lean = {id(b): b for unit in stage.units.units.values() for b in unit.buckets if b.lean}.values()
    batches = microbatches(case, 0, model.mesh.group("dp"))
    with Gathered([b.whole for b in lean]) as live:
        model.forward_backward(batches, 1.0)
        model.evaluate(batches)
    units = {
        name: sum(b.whole.numel() * b.whole.element_size() for b in unit.buckets if b.lean)
        for name, unit in stage.units.units.items()
    }
    return live.peak, units, live.bytes


def built_from_nothing(case: Case) -> tuple[int, int, int]:
    """Peak bytes while a model is built, bytes of what stays, bytes of the largest unit."""
    mesh = Mesh(dist.get_rank(), **case.layout.axes)
    with Live() as live:
        model = ParallelModel(case.model, case.layout, mesh, torch.float32, torch.device("cpu"), 1)
    flats = [stage.flat for stage in model.stages.values()]
    stays = sum(x.nbytes for flat in flats for x in (flat.weights, flat.grads))
    return live.peak, stays, max(b.whole.numel() * b.whole.element_size() for flat in flats for b in flat.buckets)


def drawn_module(zero: int) -> tuple[int, int, int, list[float]]:
    """A module that is built on the meta device and sharded: peak bytes, what stays, the largest unit, and losses."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12))
            module = nn.Sequential(*blocks, nn.Linear(32, 1))
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        names = tuple(str(i) for i in range(13))
        with Live() as live:
            sharded = shard_module(module, optimizer, zero=zero, units=names, values=normal_values, seed=5)
        stays = sum(x.nbytes for flat in sharded.flats for x in (flat.weights, flat.grads))
        largest = max(b.whole.nbytes for flat in sharded.flats for b in flat.buckets if b.whole.numel())
        losses = []
        for _ in range(3):
            loss = module(torch.arange(64.0).view(2, 32) / 64).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return live.peak, stays, largest, losses
    finally:
        torch.set_default_dtype(torch.float32)


def normal_values(name: str, values: torch.Tensor) -> None:
    """Small normal numbers."""
    values.normal_(std=0.1)


def gather_counts(case: Case) -> tuple[int, int, int]:
    """Elements gathered in a step, those of a rank's units that have no use for them in the backward, and of all."""
    model = build(case)
    gathered = 0
    send = Bucket.send_weights

    def sent(self: Bucket) -> None:
        nonlocal gathered
        gathered += self.whole.numel()
        send(self)

    with patch.object(Bucket, "send_weights", sent):
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1.0)
    stages = model.stages.values()
    units = [(unit.lookback, b) for s in stages if s.units is not None for unit in s.units.units.values()
             for b in unit.buckets]  # fmt: skip
    return gathered, sum(b.whole.numel() for back, b in units if not back), sum(s.gathered_elements for s in stages)


@dataclass
class Opened:
    """Of a step: most bytes of unreduced gradients at any operation, elements that were reduced, those of the rank's
    stages, and those of the largest bucket.
    """

    peak: int
    reduced: int
    stages: dict[int, int]
    largest: int


def opened_gradients(case: Case) -> Opened:
    """What is open when: from the making of its memory until its sum is there (a thread of gloo may hold it longer)."""
    model = build(case)
    flats = [stage.flat for stage in model.stages.values()]
    reduced, opened, reduce, land, noted = 0, Bucket._opened, Bucket.reduce, Flat._land, Noted()
    flying: dict[int, list[tuple[int, int]]] = {id(flat): [] for flat in flats}
    times: Counter[int] = Counter()  # that a bucket has been reduced
    flat_of = {id(b): id(flat) for flat in flats for b in flat.buckets}

    def note(self: Bucket) -> torch.Tensor:
        full = opened(self)
        noted.note((id(self), times[id(self)]), full)
        return full

    def count(self: Bucket) -> Any:
        nonlocal reduced
        reduced += self.stop - self.start
        self._opened()
        flying[flat_of[id(self)]].append((id(self), times[id(self)]))
        pending = reduce(self)
        times[id(self)] += 1
        return pending

    def landed(self: Flat, left: int) -> None:
        land(self, left)
        while len(flying[id(self)]) > len(self._flying):
            noted.forget(flying[id(self)].pop(0))

    with (
        patch.object(Bucket, "_opened", note),
        patch.object(Bucket, "reduce", count),
        patch.object(Flat, "_land", landed),
        noted,
    ):
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1.0)
    sizes = [b.stop - b.start for flat in flats for b in flat.buckets if b.streams]
    stages = {number: stage.summed_elements for number, stage in model.stages.items()}
    return Opened(noted.peak, reduced, stages, max(sizes, default=0))


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
    flat = Flat(dict(module.items()), placed, plan, torch.float32, device, lambda *_: None, Partial(), {})  # type: ignore[arg-type]
    flat.begin()
    for sink in flat.sinks.values():
        sink.add(torch.full(shape, float(rank)))
    flat.finish_reduce()
    sums: dict[str, Any] = {v.placed.name: float(v.grad[0]) for v in flat.views()}
    return {**sums, "pair": float(sum(pair))}, {v.placed.name: v.box.size for v in flat.views()}
