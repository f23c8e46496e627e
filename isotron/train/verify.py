"""The float64 matrix: a layout against one process, tensor by tensor. Tests and `isotron verify` call the same functions.

`measure` trains a few steps and collects the loss, every gradient, the norm and the weights under their global names, put
together from the ranks' pieces (buffers start as NaN and every element must come exactly once). `compare` holds two such
measurements against each other by one rule: max|a-b| <= tolerance * max(max|b|, 1e-3 * rms of all gradients).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.layout import Box
from isotron.core.mesh import AXES, Group, Mesh
from isotron.core.optim.adamw import AdamW
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.data import Flat
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.replicas import unequal_replicas
from isotron.core.precision.scaler import LossScaler
from isotron.core.random import key, normal
from isotron.train.step import train_step

INJECTIONS = ("drop-allreduce", "double-bias")


@dataclass(frozen=True)
class Case:
    """What is trained: a model config, its layout, the global batch and the data."""

    model: Any
    layout: Layout
    sequence: int = 32
    micro_batch: int = 1
    global_batch: int = 4
    steps: int = 5
    microbatch_counts: tuple[int, ...] = ()
    dtype: str = "float64"
    seed: int = 7
    isolate: bool = False
    inject: str = ""


@dataclass
class Measured:
    """What one layout gives; tensors under global names."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)


def sample(case: Case, number: int) -> tuple[Tensor, Tensor]:
    """Token row and loss mask of one sample: unequal numbers of unmasked tokens, every fourth sample all masked."""
    generator = torch.Generator().manual_seed(key(case.seed, "sample", number))
    row = torch.randint(0, case.model.vocab_size, (case.sequence + 1,), generator=generator)
    mask = (torch.rand(case.sequence, generator=generator) < 0.25 + 0.25 * (number % 3)).float()
    return row, mask * (number % 4 != 3)


def microbatches(case: Case, step: int, dp: Group) -> list[Batch]:
    """This data-parallel rank's microbatches of one step."""
    share = case.micro_batch * dp.size
    counts = case.microbatch_counts or (max(1, case.global_batch // share),)
    per_step = [c * case.global_batch for c in counts] if case.microbatch_counts else [case.global_batch]
    first = sum(per_step[i % len(per_step)] for i in range(step))
    batches = []
    for j in range(per_step[step % len(per_step)] // share):
        start = first + j * share + dp.index * case.micro_batch
        rows, masks = zip(*(sample(case, n) for n in range(start, start + case.micro_batch)), strict=True)
        tokens = torch.stack(rows)
        positions = torch.arange(case.sequence).expand(case.micro_batch, -1)
        docs = (positions >= case.sequence // 3).long() if case.isolate else None
        ids = torch.arange(start, start + case.micro_batch)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], torch.stack(masks), positions, ids, docs))
    return batches


def randomise(model: ParallelModel, seed: int) -> None:
    """Every weight, bias and gain random, so that no term can hide behind a zero or a one."""
    for stage in model.stages.values():
        for name, placed in stage.placed.items():
            rule = placed.rule
            noise = normal(rule.shape, seed, placed.name)
            full = noise * 0.3 + (1.0 if rule.init == "ones" else 0.0) if len(rule.shape) == 1 else noise * 0.15
            p = stage.module.get_parameter(name)
            for piece in placed.shard.pieces:
                p.data[piece.local_box.slices()] = full[piece.global_box.slices()].to(p)


def _assemble(parts: Iterable[tuple[str, tuple[int, ...], list[tuple[Box, Tensor]]]], world: Group) -> dict[str, Tensor]:
    """On the first rank, global tensors from every rank's pieces."""
    mine = [(n, s, [(b.offset, b.shape, t.double().cpu().clone()) for b, t in pieces]) for n, s, pieces in parts]
    everyone: list[Any] = [mine]
    if world.size > 1:
        everyone = [None] * world.size
        dist.all_gather_object(everyone, mine, group=world.handle)
    whole: dict[str, Tensor] = {}
    for name, shape, pieces in (entry for rank in everyone for entry in rank):
        full = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        for offset, size, values in pieces:
            target = full[Box(offset, size).slices()]
            if not torch.isnan(target).all():
                raise RuntimeError(f"{name} at {offset} x {size} is held as its own by two ranks")
            target.copy_(values)
    missing = [name for name, full in whole.items() if torch.isnan(full).any()]
    if missing:
        raise RuntimeError(f"no rank holds all of {', '.join(missing)} as its own, or it is NaN")
    return whole


def gradients(model: ParallelModel) -> Iterable[tuple[str, tuple[int, ...], list[tuple[Box, Tensor]]]]:
    """Summed gradients in the form of `model.weight_pieces`."""
    for stage in model.stages.values():
        for view in stage.flat.saved_views():
            yield view.placed.name, view.placed.rule.shape, list(view.pieces(view.grad))


def measure(case: Case) -> Measured:
    """Train `case.steps` steps in its layout on the ranks of this world; complete on the first rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = case.layout
    mesh = Mesh(rank, tp=layout.tp, dp=max(layout.dp, 1), pp=layout.pp)
    dtype = getattr(torch, case.dtype)
    model = ParallelModel(case.model, layout, mesh, dtype, torch.device("cpu"), case.seed)
    world, found = mesh.group(*AXES), Measured()
    found.initial = _assemble(model.weight_pieces(), world)
    randomise(model, case.seed + 1)
    # epsilon far above rounding keeps Adam from turning the last bit of a tiny gradient into a step
    optimizer = AdamW(model.views(), OptimConfig(clip_grad=1.0, adam_eps=1e-6))
    schedule = ScheduleConfig(lr=1e-3, lr_decay_style="constant", weight_decay=0.1)
    with injected(case.inject):
        for step in range(case.steps):
            batches = microbatches(case, step, mesh.group("dp"))
            result = train_step(model, optimizer, LossScaler(1.0, dynamic=False), schedule, batches)
            found.losses.append(result.loss)
            found.norms.append(result.grad_norm)
            if step == 0:
                found.gradients = _assemble(gradients(model), world)
            differing = unequal_replicas(model)
            if differing:
                raise RuntimeError(f"replicated weights differ between ranks after step {step + 1}: {differing}")
    found.weights = _assemble(model.weight_pieces(), world)
    return found


def injected(fault: str) -> AbstractContextManager[Any]:
    """A deliberate mistake, to see that the check notices: one gradient sum left out, or a bias added twice."""
    if fault == "drop-allreduce":
        return patch.object(Flat, "_sum_partial", lambda self: None)
    return nullcontext()


@dataclass(frozen=True)
class Row:
    """One line of the verdict: the largest difference, the scale it is held against, and whether it passes."""

    what: str
    difference: float
    scale: float
    passes: bool


def compare(found: Measured, reference: Measured, tolerance: float = 1e-9) -> list[Row]:
    """Loss, norm, every gradient and every weight of one layout against one process."""
    squares = sum(float(g.square().sum()) for g in reference.gradients.values())
    count = sum(g.numel() for g in reference.gradients.values())
    floor = 1e-3 * (squares / max(count, 1)) ** 0.5
    table = []

    def row(what: str, a: Tensor, b: Tensor) -> None:
        scale = max(float(b.abs().max()), floor)
        difference = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
        table.append(Row(what, difference, scale, difference <= tolerance * scale))

    row("loss", torch.tensor(found.losses, dtype=torch.float64), torch.tensor(reference.losses, dtype=torch.float64))
    row("gradient norm", torch.tensor(found.norms, dtype=torch.float64), torch.tensor(reference.norms, dtype=torch.float64))
    for kind in ("initial", "gradients", "weights"):
        ours, theirs = getattr(found, kind), getattr(reference, kind)
        for name in sorted(ours.keys() | theirs.keys()):
            nothing = torch.full((1,), torch.nan)
            row(f"{kind[:-1]} {name}", ours.get(name, nothing), theirs.get(name, nothing))
    return table
