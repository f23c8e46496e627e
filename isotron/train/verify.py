"""The float64 matrix: a layout against one process, tensor by tensor. Tests and `isotron verify` call the same
functions.

`measure` trains a few steps and collects the loss, every gradient, the norm and the weights under their global names,
put together from the ranks' pieces (buffers start as NaN and every element must come exactly once). `compare` holds
two such measurements against each other by one rule: max|a-b| <= tolerance * max(max|b|, 1e-3 * rms of all gradients).
Gradients that this rule cannot tell from zero are stepped as zero (see `_Recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isotron.core import comm
from isotron.core import device as devices
from isotron.core.batch import Batch
from isotron.core.errors import listed, refuse
from isotron.core.layout import Box
from isotron.core.mesh import ALONE, AXES, Group, Mesh
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.clip import global_norm
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.optimizer import Optimizer
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.replicas import unequal_replicas
from isotron.core.random import key, normal
from isotron.train.inject import injected
from isotron.train.step import train_step

TOLERANCE = 1e-9
FLOOR = 1e-3  # of the rms of all gradients: the least that a difference is held against


@dataclass(frozen=True)
class Case:
    """What is trained: a model config, its layout, the global batch and the data.

    `batch_multiples`: step i has multiples[i % len] x `global_batch` samples, whatever the layout makes of them.
    `masked_steps`: steps in which no token counts. `isolate`: two documents per sample that do not see each other.
    `frozen`: patterns of parameters that are not trained. `device`: "cpu", or "cuda" with one device per rank. `rows`:
    gives the samples of a range as a batch; random ones without it. `source`: longest sequence of an encoder, 0 for
    models without one. `types`: of tokens, drawn like them; 0 for models without types.
    """

    model: Any
    layout: Layout
    sequence: int = 32
    micro_batch: int = 1
    global_batch: int = 4
    steps: int = 5
    batch_multiples: tuple[int, ...] = ()
    masked_steps: tuple[int, ...] = ()
    dtype: str = "float64"
    seed: int = 7
    isolate: bool = False
    inject: str = ""
    frozen: tuple[str, ...] = ()
    device: str = "cpu"
    rows: Callable[[range], Batch] | None = None
    source: int = 0
    types: int = 0
    # epsilon far above rounding keeps Adam from turning the last bit of a tiny gradient into a step
    optim: OptimConfig = OptimConfig(clip_grad=1.0, adam_eps=1e-6)


@dataclass
class Measured:
    """What one layout gives; tensors under global names. `differing`: copies that were not bitwise equal after a
    step. `aux`: what each step reports beside its loss; `weights` hold buffers too.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    aux: list[dict[str, Any]] = field(default_factory=list)


def sample(case: Case, number: int) -> tuple[Tensor, Tensor]:
    """Token row and loss mask of one sample: unequal numbers of unmasked tokens, every fourth sample all masked."""
    generator = torch.Generator().manual_seed(key(case.seed, "sample", number))
    row = torch.randint(0, case.model.vocab_size, (case.sequence + 1,), generator=generator)
    mask = (torch.rand(case.sequence, generator=generator) < 0.25 + 0.25 * (number % 3)).float()
    return row, mask * (number % 4 != 3)


def _with_source(batch: Batch, case: Case, numbers: range) -> Batch:
    """With what an encoder reads: rows of unequal lengths, the rest is padding that nothing may see."""
    generators = (torch.Generator().manual_seed(key(case.seed, "source", n)) for n in numbers)
    rows = [torch.randint(0, case.model.vocab_size, (case.source,), generator=g) for g in generators]
    lengths = [case.source - n % 3 * (case.source // 4) for n in numbers]
    return replace(batch, source=torch.stack(rows), source_lengths=torch.tensor(lengths))


def _with_types(batch: Batch, case: Case, numbers: range) -> Batch:
    """With a type for every token."""
    generators = (torch.Generator().manual_seed(key(case.seed, "types", n)) for n in numbers)
    rows = [torch.randint(0, case.types, (case.sequence,), generator=g) for g in generators]
    return replace(batch, types=torch.stack(rows))


def microbatches(case: Case, step: int, dp: Group) -> list[Batch]:
    """This data-parallel rank's microbatches of one step."""
    share = case.micro_batch * dp.size
    sizes = [n * case.global_batch for n in case.batch_multiples or (1,)]
    if any(size % share for size in sizes):
        raise refuse(
            f"steps of {sizes} samples, micro_batch_size {case.micro_batch} and dp {dp.size}",
            f"every step is cut into whole microbatches of {case.micro_batch} x {dp.size} = {share} samples",
            f"a global batch of {share}",
        )
    first = sum(sizes[i % len(sizes)] for i in range(step))
    batches = []
    for j in range(sizes[step % len(sizes)] // share):
        start = first + j * share + dp.index * case.micro_batch
        numbers = range(start, start + case.micro_batch)
        if case.rows is not None:
            batches.append(case.rows(numbers))
            continue
        rows, masks = zip(*(sample(case, n) for n in numbers), strict=True)
        tokens = torch.stack(rows)
        positions = torch.arange(case.sequence).expand(case.micro_batch, -1)
        docs = (positions >= case.sequence // 3).long() if case.isolate else None
        ids = torch.tensor(list(numbers))
        mask = torch.stack(masks) * (step not in case.masked_steps)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, positions, ids, docs)
        batch = _with_types(batch, case, numbers) if case.types else batch
        batches.append(_with_source(batch, case, numbers) if case.source else batch)
    return batches


def _own(case: Case, step: int, model: ParallelModel) -> list[Batch]:
    """This rank's microbatches of one step, dealt anew where the layout says so."""
    if case.layout.hybrid_context_parallel:
        return model.deal(microbatches(replace(case, micro_batch=1), step, ALONE))
    return microbatches(case, step, model.mesh.group("dp"))


def randomise(model: ParallelModel, seed: int) -> None:
    """Every weight, bias and gain random, so that no term can hide behind a zero or a one."""
    for stage in model.stages.values():
        for view in stage.flat.held():
            rule = view.placed.rule
            noise = normal(rule.shape, seed, view.placed.name)
            full = noise * 0.3 + (1.0 if rule.init == "ones" else 0.0) if len(rule.shape) == 1 else noise * 0.15
            for box, part in view.pieces(view.weight, owned=False):
                part.copy_(full[box.slices()])
        for name, rule in stage.buffers.items():
            stage.module.get_buffer(name).copy_(normal(rule.shape, seed, name) * 0.1)


def _assemble(
    parts: Iterable[tuple[str, tuple[int, ...], list[tuple[Box, Tensor]]]], world: Group
) -> dict[str, Tensor]:
    """On the first rank, global tensors from every rank's pieces; nothing on the others."""
    # arrays: torch would write each tensor as a file of its own, which takes far longer than its few numbers
    mine = [
        (n, s, [(b.offset, b.shape, t.detach().double().cpu().numpy()) for b, t in pieces]) for n, s, pieces in parts
    ]
    everyone: list[Any] = [mine]
    if world.size > 1:
        everyone = [None] * world.size if world.index == 0 else []
        dist.gather_object(mine, everyone or None, dst=world.ranks[0], group=world.handle)
    whole: dict[str, Tensor] = {}
    for name, shape, pieces in (entry for rank in everyone for entry in rank):
        full = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        for offset, size, values in pieces:
            target = full[Box(offset, size).slices()]
            if not torch.isnan(target).all():
                raise RuntimeError(f"{name} at {offset} x {size} is held as its own by two ranks")
            target.copy_(torch.from_numpy(values))
    missing = [name for name, full in whole.items() if torch.isnan(full).any()]
    if missing:
        raise RuntimeError(f"no rank holds all of {listed(missing)} as its own, or it is NaN")
    return whole


def gradients(model: ParallelModel) -> Iterable[tuple[str, tuple[int, ...], list[tuple[Box, Tensor]]]]:
    """Summed gradients in the form of `model.weight_pieces`."""
    for stage in model.stages.values():
        for view in (v for v in stage.flat.saved_views() if v.trained):
            yield view.placed.name, view.placed.rule.shape, list(view.pieces(view.grad))


def saved(model: ParallelModel) -> Iterable[tuple[str, tuple[int, ...], list[tuple[Box, Tensor]]]]:
    """Weights and buffers."""
    yield from model.weight_pieces()
    yield from model.buffer_pieces()


class _Recording(Optimizer):
    """Keeps the gradients of the first update as they are before clipping, so that a wrong one is alone in being
    wrong; then, in every update, makes those zero that `compare` cannot tell from zero. Some are zero but for rounding
    (a key's bias moves all scores of a query alike), and a rule that takes their sign or divides by their size would
    make whole steps of it.
    """

    model: ParallelModel
    gradients: dict[str, Tensor]

    def step(self, lr: float, weight_decay: float, gradient_factor: float) -> None:
        """Collective in the first update."""
        if self.updates == 0:
            self.gradients = _assemble(gradients(self.model), self.model.mesh.group(*AXES))
        least = TOLERANCE * FLOOR * self._rms()
        for view in self.views:
            view.grad.masked_fill_(view.grad.abs() < least, 0.0)
        super().step(lr, weight_decay, gradient_factor)

    def _rms(self) -> float:
        """Of all gradients, each counted once; the same on every rank."""
        world, device = self.model.mesh.group(*AXES), self.model.device
        own = sum(grad.numel() for view in self.views if view.counts for _, grad in view.pieces(view.grad))
        count = float(comm.all_reduce(torch.tensor(own, device=device), world))
        return global_norm(self.views, world, device=device) / max(count, 1.0) ** 0.5


def measure(case: Case) -> Measured:
    """Train `case.steps` steps in its layout on the ranks of this world; complete on the first rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = case.layout
    mesh = Mesh(rank, **layout.axes)
    dtype = getattr(torch, case.dtype)
    model = ParallelModel(
        case.model, layout, mesh, dtype, devices.resolve(case.device, mesh.rank), case.seed, case.frozen
    )
    world, found = mesh.group(*AXES), Measured()
    found.initial = _assemble(model.weight_pieces(), world)
    randomise(model, case.seed + 1)
    optimizer = make_optimizer(model, case.optim, _Recording)
    optimizer.model, optimizer.gradients = model, {}
    schedule = ScheduleConfig(lr=1e-3, lr_decay_style="constant", weight_decay=0.1)
    with injected(case.inject, model):
        for step in range(case.steps):
            batches = [b.to(model.device) for b in _own(case, step, model)]
            result = train_step(model, optimizer, schedule, batches)
            found.losses.append(result.loss)
            found.norms.append(result.grad_norm)
            found.aux.append(dict(result.aux))
            found.differing += [name for name in unequal_replicas(model) if name not in found.differing]
    found.gradients, found.weights = optimizer.gradients, _assemble(saved(model), world)
    return found


@dataclass(frozen=True)
class Row:
    """One line of the verdict: the largest difference, the scale it is held against, and whether it passes."""

    what: str
    difference: float
    scale: float
    passes: bool


def compare(found: Measured, reference: Measured, tolerance: float = TOLERANCE) -> list[Row]:
    """Loss, norm, every gradient and every weight of one layout against one process."""
    squares = sum(float(g.square().sum()) for g in reference.gradients.values())
    count = sum(g.numel() for g in reference.gradients.values())
    floor = FLOOR * (squares / max(count, 1)) ** 0.5
    table = []

    def row(what: str, a: Tensor, b: Tensor) -> None:
        scale = max(float(b.abs().max()), floor)
        difference = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
        table.append(Row(what, difference, scale, difference <= tolerance * scale))

    row("loss", torch.tensor(found.losses, dtype=torch.float64), torch.tensor(reference.losses, dtype=torch.float64))
    row(
        "gradient norm",
        torch.tensor(found.norms, dtype=torch.float64),
        torch.tensor(reference.norms, dtype=torch.float64),
    )
    for name in sorted({name for step in (*found.aux, *reference.aux) for name in step}):
        row(f"aux {name}", *(_series(m.aux, name) for m in (found, reference)))
    table += [Row(f"copies of {name}", 1.0, 1.0, False) for name in found.differing]
    for kind, label in (("initial", "initial"), ("gradients", "gradient"), ("weights", "weight")):
        ours, theirs = getattr(found, kind), getattr(reference, kind)
        for name in sorted(ours.keys() | theirs.keys()):
            nothing = torch.full((1,), torch.nan)
            row(f"{label} {name}", ours.get(name, nothing), theirs.get(name, nothing))
    return table


def _series(steps: list[dict[str, Any]], name: str) -> Tensor:
    """What all steps report under a name; NaN where they do not."""
    return torch.stack([torch.tensor(step.get(name, torch.nan), dtype=torch.float64).reshape(-1) for step in steps])
