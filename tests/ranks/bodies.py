"""What the ranks of a test run, where `verify.measure` is not enough."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from isotron.core import comm
from isotron.core import shared_memory as shm
from isotron.core.batch import Batch
from isotron.core.mesh import ALONE, Group, Mesh
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.pipeline import runtime
from isotron.core.precision.scaler import LossScaler
from isotron.train.step import StepResult, train_step
from isotron.train.verify import Case, Measured, measure, microbatches, randomise


def build(case: Case) -> ParallelModel:
    """A model with random weights in the case's layout."""
    where = case.layout
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, **where.axes)
    model = ParallelModel(
        case.model, where, mesh, getattr(torch, case.dtype), torch.device("cpu"), case.seed, case.frozen
    )
    randomise(model, case.seed + 1)
    return model


def steps_of(
    model: ParallelModel,
    case: Case,
    lr: float = 1e-2,
    after: Callable[[], None] = lambda: None,
    same_data: bool = False,
) -> list[StepResult]:
    """Train the case's steps; `after` runs after each. `same_data`: the first step's batches again and again."""
    optimizer = make_optimizer(model, OptimConfig())
    schedule = ScheduleConfig(lr=lr, lr_decay_style="constant")
    results = []
    for step in range(case.steps):
        batches = microbatches(case, 0 if same_data else step, model.mesh.group("dp"))
        results.append(train_step(model, optimizer, schedule, batches))
        after()
    model.wait_weights()
    return results


def tied_runs(case: Case) -> tuple[dict[str, int], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Where this rank is, and which rows of the tied embedding it steps."""
    model = build(case)
    views = [view for view in model.views() if view.placed.name == "embed.weight"]
    return model.mesh.coordinate, [(view.box.offset, view.box.shape) for view in views]


def with_layout(case: Case, **changes: Any) -> Case:
    """The case in a changed layout."""
    return replace(case, layout=replace(case.layout, **changes))


def evaluated(case: Case) -> list[float]:
    """The sum of losses over a global batch."""
    model = build(case)
    return _evaluate(model, case)


def _evaluate(model: ParallelModel, case: Case) -> list[float]:
    return model.sum_terms(model.evaluate(microbatches(case, 9, model.mesh.group("dp"))), ["loss"])


def trained_and_evaluated(case: Case) -> list[float]:
    """Losses of training and of an evaluation after every step."""
    model, found = build(case), []
    results = steps_of(model, case, after=lambda: found.extend(_evaluate(model, case)))
    return [result.loss for result in results] + found


def most_sends_under_way(case: Case) -> int:
    """The most sends that one step kept at a time."""
    most = 0
    transfer = runtime._Pass.transfer

    def watched(self: Any, actions: Any) -> None:
        nonlocal most
        transfer(self, actions)
        most = max(most, len(self.leaving))

    with patch.object(runtime._Pass, "transfer", watched):
        model = build(case)
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1.0)
    return most


def padding_rows(case: Case) -> tuple[float, float, int]:
    """Largest weight and gradient in the rows of this rank that are padding, and real rows, after training."""
    model = build(case)
    steps_of(model, case)
    worst_w = worst_g = 0.0
    real = 0
    for stage in model.stages.values():
        for name, placed in stage.placed.items():
            if placed.name not in ("embed.weight", "head.weight"):
                continue
            rows = sum(piece.local_box.shape[0] for piece in placed.shard.pieces)
            real += rows
            w, g = stage.module.get_parameter(name).data[rows:], stage.flat.sinks[name].buffer[rows:]
            if w.numel():
                worst_w, worst_g = max(worst_w, float(w.abs().max())), max(worst_g, float(g.abs().max()))
    return worst_w, worst_g, real


def perturbed_first_document(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Losses of (first, second) document per token before and after a change in the first document."""
    model = build(case)
    (batch,) = microbatches(replace(case, isolate=True, global_batch=1), 0, model.mesh.group("dp"))
    at = case.sequence // 3
    changed = batch.tokens.clone()
    changed[:, 1] = (changed[:, 1] + 1) % case.model.vocab_size
    return [
        (_losses(model, b, 0, at), _losses(model, b, at, case.sequence))
        for b in (batch, replace(batch, tokens=changed))
    ]


def _losses(model: ParallelModel, batch: Batch, start: int, stop: int) -> Tensor:
    """The losses of positions [start, stop), one by one."""
    found = []
    for i in range(start, stop):
        mask = torch.zeros_like(batch.loss_mask)
        mask[:, i] = 1
        terms = model.evaluate([replace(batch, loss_mask=mask)])
        found += model.sum_terms(terms, ["loss"])
    return torch.tensor(found)


def overflow(case: Case, rank: int) -> list[Any]:
    """float16 steps, one rank's gradient infinite in steps 1 and 2: (skipped, scale, weights moved) of each step."""
    model = build(case)
    optimizer = make_optimizer(model, OptimConfig())
    scaler = LossScaler(2.0**8, hysteresis=2, window=2)
    schedule = ScheduleConfig(lr=1e-2, lr_decay_style="constant")
    seen = []
    for step in range(case.steps):
        before = [stage.flat.weights.clone() for stage in model.stages.values()]
        batches = microbatches(case, step, model.mesh.group("dp"))
        if step in (1, 2) and model.mesh.rank == rank:
            stage = list(model.stages.values())[-1]
            with _infinite_gradient(stage.flat):
                result = train_step(model, optimizer, schedule, batches, scaler.scale)
        else:
            result = train_step(model, optimizer, schedule, batches, scaler.scale)
        scaler.update(result.overflow)
        model.wait_weights()
        moved = any(not torch.equal(a, s.flat.weights) for a, s in zip(before, model.stages.values(), strict=True))
        seen.append((result.skipped, scaler.scale, moved))
    return seen


class _infinite_gradient:
    """One element of a stage's gradients is infinite before they are summed over ranks."""

    def __init__(self, flat: Any) -> None:
        self.flat, self.start = flat, flat.start

    def __enter__(self) -> None:
        def start(bucket: Any) -> None:
            for sink in bucket.sinks:
                sink.clear_if_fresh()
            self.flat.grads[bucket.start] = torch.inf
            self.start(bucket)

        self.flat.start = start

    def __exit__(self, *_: object) -> None:
        del self.flat.start


@contextmanager
def by_way_of(way: str) -> Iterator[None]:
    """Messages go through the streams of ranks that meet in memory, through their slots, in turns of small slots, or
    over gloo.
    """
    sizes = {"slots": {"INLINE": 0}, "turns": {"INLINE": 0, "SLOT": 32}}.get(way, {"INLINE": shm.INLINE})
    with patch.dict(os.environ, {shm.OFF: "1" if way == "gloo" else ""}), patch.multiple(shm, **sizes):
        yield


def measured_over_gloo(case: Case) -> Measured:
    """A case of ranks that do not meet in memory."""
    with by_way_of("gloo"):
        return measure(case)


def measured_in_turns(case: Case) -> Measured:
    """A case of ranks that meet in memory where next to nothing fits."""
    with patch.multiple(shm, INLINE=256, SLOT=2048):
        return measure(case)


def collectives(dtype: str, dim: int, way: str) -> dict[str, list[Any]]:
    """Inputs and results of every collective over the world on this rank, as nested lists of float64."""
    with by_way_of(way):
        return _collectives(dtype, dim, way)


def _collectives(dtype: str, dim: int, way: str) -> dict[str, list[Any]]:
    group = Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp")
    kind = getattr(torch, dtype)
    n, i = group.size, group.index
    shape = [2, 3, 4]
    shape[dim] = 2 * n
    x = torch.arange(math.prod(shape)).view(shape).remainder(13).add(i).to(kind)
    cuts = [0, 3, 3, 10, 11][:n] + [16]  # with an empty run
    flat = torch.arange(16).remainder(5).add(i).to(kind)
    shared = flat.clone()
    got = {
        "sum": comm.all_reduce(x.clone(), group),
        "sum of a transpose": comm.all_reduce(x.clone().transpose(0, 2), group),
        "max": comm.all_reduce(x.clone(), group, "max"),
        "all_gather": comm.all_gather(x, group, dim),
        "reduce_scatter": comm.reduce_scatter(x, group, dim),
        "reduce_flat": comm.start_reduce_flat(flat.clone(), cuts, group).wait(),
        "gather_flat": comm.start_gather_flat(shared, cuts, group).wait(),
        "broadcast": comm.broadcast(x.clone(), group, n - 1),
    }
    assert all(t.dtype == kind for t in got.values())
    assert (group.line is None) == (way == "gloo")
    return {"x": x.tolist(), "flat": flat.tolist(), "cuts": cuts, **{k: t.tolist() for k, t in got.items()}}


def small_sums(dtype: str, way: str) -> list[float]:
    """256 on the first rank and 1 on the others, summed by every route."""
    with by_way_of(way):
        group = Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp")
        x = torch.full((group.size,), 256.0 if group.index == 0 else 1.0, dtype=getattr(torch, dtype))
        flat = comm.start_reduce_flat(x.clone(), list(range(group.size)) + [group.size], group).wait()
        return [
            float(comm.all_reduce(x.clone(), group)[0]),
            float(comm.reduce_scatter(x.clone(), group, 0)[0]),
            float(flat[0]),
        ]


def flat_sums() -> list[float]:
    """256 on the first rank and 1 on the others in bfloat16, by a transport that is not taken for gloo."""
    with by_way_of("gloo"), patch.object(comm, "_is_gloo", lambda group: False):
        group = Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp")
        xs = (torch.full(n, 256.0 if group.index == 0 else 1.0, dtype=torch.bfloat16) for n in ((7,), (2, 1)))
        return [n for x in xs for n in comm.all_reduce(x, group, once=True).flatten().tolist()]


def random_sums(way: str) -> str:
    """The bits of a sum of random numbers, float32 and bfloat16."""
    with by_way_of(way):
        group = Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp")
        x = torch.randn(500, generator=torch.Generator().manual_seed(group.index))
        found = comm.all_reduce(x.clone(), group), comm.all_reduce(x.bfloat16(), group).float()
    return str([t.view(torch.int32).tolist() for t in found])


def facts(way: str) -> tuple[Any, Any, list[float]]:
    """gather_json, broadcast_json, and a ring of exchanges."""
    with by_way_of(way):
        return _facts(Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp"))


def _facts(group: Group) -> tuple[Any, Any, list[float]]:
    after, before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
    mine, theirs = torch.tensor([float(group.index)]), torch.empty(1)
    pending = comm.exchange([(mine, after)], [(theirs, before)], group)
    values = [float(p.wait()) for p in pending]
    comm.barrier(group)
    return comm.gather_json({"rank": group.index}, group), comm.broadcast_json([group.index, "x"], group), values


def facts_alone() -> tuple[Any, Any]:
    """The same on one rank."""
    comm.barrier(ALONE)
    return comm.gather_json({"rank": 0}, ALONE), comm.broadcast_json([0, "x"], ALONE)


def dropout_masks(case: Case) -> list[tuple[str, int, tuple[int, int], tuple[int, int], Tensor]]:
    """Where each dropout of the model keeps: (name, rank, sequence slice, head slice, mask)."""
    from isotron.core.nn.dropout import Dropout

    model = build(case)
    found = []
    for stage in model.stages.values():
        stage.module.train()
        for layer in stage.module.modules():
            if isinstance(layer, Dropout) and layer.p > 0:
                s = case.sequence // layer.sequence[1]
                ids = torch.tensor([5, 9])
                if layer.name.endswith("core"):
                    ones = torch.ones(2, case.model.num_attention_heads // layer.heads[1], case.sequence, case.sequence)
                    mask = layer.on_probabilities(ones, ids) > 0
                else:
                    mask = layer(torch.ones(2, s, case.model.hidden_size), ids) > 0
                found.append((layer.name, model.mesh.rank, layer.sequence, layer.heads, mask))
    return found


def timeouts() -> set[float | None]:
    """Seconds that a message may take, over every group that a mesh makes and wherever its ranks meet in memory."""
    mesh = Mesh(dist.get_rank(), tp=2, cp=2, dp=2, ep=2)
    first = mesh.places("dp", [0])
    made = [*mesh.axes.values(), mesh.apart(), *([first] if first is not None else [])]
    groups = [group for group in made if group.size > 1]
    assert len({group.handle for group in groups}) > 5 and all(group.line is not None for group in groups)
    backs = [group.handle._get_backend(torch.device("cpu")) for group in groups]
    return {back.options._timeout.total_seconds() for back in backs} | {group.line.timeout for group in groups}
