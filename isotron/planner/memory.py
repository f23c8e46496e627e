"""Bytes on a rank, by kind. PURE.

Weights, gradients, masters and moments are exact: the shapes of the layout table, cut by the functions that cut the
real buffers. Activations come from `activations.py` and the real pipeline table. The rest is what an implementation
needs for a moment: logits of a chunk, a recomputed unit, buffers of communication, the context of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from isotron.core.parallel.pipeline.actions import Kind, Schedule
from isotron.core.parallel.pipeline.live import with_sums, with_weights
from isotron.core.parallel.plan import Layout
from isotron.planner import pairs
from isotron.planner.activations import block_bytes, stage_bytes
from isotron.planner.job import Job
from isotron.planner.live import gathered_elements, live_bytes, summed_elements
from isotron.planner.parameters import StagePart, rank_stages
from isotron.planner.states import states_of

LOSS_CHUNK = 64 << 20  # bytes of logits at hand (core/nn/logits.py)
LOSS_BLOCK = 4 << 20  # bytes of logits in float32 at hand
KINDS = (
    *("weights", "gradients", "masters", "moments", "activations", "recompute", "logits", "temporaries"),
    *("gathered", "communication", "context"),
)


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank by kind."""

    weights: float = 0
    gradients: float = 0
    masters: float = 0
    moments: float = 0
    activations: float = 0
    recompute: float = 0  # the unit that is computed again at the moment
    logits: float = 0
    temporaries: float = 0  # input gradients and one weight gradient in 16 bits
    gathered: float = 0  # weights and gradients that exist for a moment under ZeRO-2 and 3
    communication: float = 0  # gathered sequences, tensors between stages
    context: float = 0  # driver, kernels, communicators
    host: float = 0  # what lives in host memory or on disk, beside the total

    @property
    def states(self) -> float:
        """Weights, gradients, masters and moments."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> float:
        """All kinds, on the device."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "host")


def states(job: Job, parts: Sequence[StagePart], dp_rank: int | None = None, tp_rank: int = 0) -> Bytes:
    """The exact bytes of a rank's state; without `dp_rank` those of the rank of the stage that has most: runs end at
    whole rows, so that they differ, and experts are dealt to other ranks than the rest is.
    """
    layout = job.layout
    beside = range(layout.tp) if layout.expert_tp * layout.ep % layout.tp else (0,)  # the others hold what these do
    ranks = product(range(layout.data_ranks), beside) if dp_rank is None else [(dp_rank, tp_rank)]
    kinds = dict.fromkeys(_runs(layout, *rank) for rank in ranks)
    return max((_states(job, parts, runs) for runs in kinds), key=lambda b: (b.states, b.host))


def _states(job: Job, parts: Sequence[StagePart], runs: tuple[int, int]) -> Bytes:
    layout, zero = job.layout, job.layout.zero_stage
    weights = sum(p.elements if zero < 3 else p.run(*runs) for p in parts)
    gradients = sum(p.trained if zero < 2 else p.run(*runs, trained=True) for p in parts)
    lean = sum(p.run(*runs, lean=True) for p in parts) if layout.offload.weights and zero == 3 else 0
    away = sum(p.run(*runs, lean=True, trained=True) for p in parts) if layout.offload.gradients and zero >= 2 else 0
    kept = states_of(job, parts, runs)
    sizes = ((weights - lean) * job.element, (gradients - away) * job.gradient, kept.masters, kept.moments)
    return Bytes(*sizes, host=lean * job.element + away * job.gradient + kept.host)


def _runs(layout: Layout, dp_rank: int, tp_rank: int) -> tuple[int, int]:
    """Which runs of what all tokens pass, and of experts, a rank steps."""
    copy = (dp_rank * layout.tp + tp_rank) // (layout.expert_tp * layout.ep)
    return dp_rank % layout.shard_ranks, copy % layout.expert_shard_ranks


def plan_memory(job: Job, context: float = 0.0) -> list[Bytes]:
    """Bytes of every pipeline rank (the tensor-parallel ranks of one stage hold the same)."""
    table = job.table()
    every = [rank_stages(job.config, job.layout, r, frozen=job.optim.freeze) for r in range(job.layout.pp)]
    kept = activation_peaks(job, table, every)
    flat = [p for parts in every for p in parts]
    if job.layout.zero_stage >= 2:
        table = with_sums(
            table, {p.number: n for p in flat if (n := summed_elements(p))}, job.layout.max_live_gradients
        )
    if job.layout.zero_stage == 3 and job.layout.max_live_parameters:
        sizes = {p.number: sum(gathered_elements(p).values()) for p in flat}
        table = with_weights(table, sizes, job.layout.max_live_parameters)
    whole = [_whole(job, states(job, parts), parts, kept[r], context) for r, parts in enumerate(every)]
    return [replace(b, gathered=live_bytes(job, table, r, every[r])) for r, b in enumerate(whole)]


def _whole(job: Job, state: Bytes, parts: Sequence[StagePart], activations: float, context: float) -> Bytes:
    last = any(p.number == job.layout.stages - 1 for p in parts)
    return replace(
        state,
        activations=activations,
        recompute=recompute_bytes(job),
        logits=logits_bytes(job) if last else 0.0,
        temporaries=temporaries(job, parts),
        communication=communication(job),
        context=context,
    )


def activation_peaks(job: Job, table: Schedule, every: Sequence[Sequence[StagePart]]) -> list[float]:
    """Most bytes that each pipeline rank keeps at once, following the table row by row."""
    last = job.layout.stages - 1
    full = job.layout.recompute == "full"
    keep = job.layout.recompute_keep if full else 0
    peaks = []
    waiting = {last: deferred_logits(job)} if any(a.kind is Kind.W for row in table.ranks for a in row) else {}
    for rank, parts in enumerate(every):
        few = {p.number: part_bytes(job, p, p.number == last) for p in parts}
        most = few
        if keep:
            most = {p.number: part_bytes(job, p, p.number == last, "none") for p in parts}
        few, most = ({s: n + waiting.get(s, 0) for s, n in sizes.items()} for sizes in (few, most))
        peaks.append(_peak(table, rank, few, most, keep))
    return peaks


def part_bytes(job: Job, part: StagePart, last: bool, mode: str | None = None) -> float:
    """Bytes that a stage keeps of one microbatch."""
    if pairs.are_read(job):
        return pairs.stage_bytes(job, part.layers, part.number == 0, last, mode)
    return stage_bytes(job, part.halves, part.number == 0, last, mode)


def _peak(table: Schedule, rank: int, few: dict[int, float], most: dict[int, float], keep: int) -> float:
    """From F to the last gradient of the same stage and microbatch; the first `keep` in flight keep everything."""
    deferred = {(a.stage, a.microbatch) for _, a in table.parts(rank) if a.kind is Kind.W}
    live: dict[tuple[int, int | None], float] = {}
    keeping: dict[int, set[int | None]] = {stage: set() for stage in few}
    now = peak = 0.0
    for _, a in table.parts(rank):
        key = (a.stage, a.microbatch)
        if a.kind is Kind.F:
            everything = len(keeping[a.stage]) < keep
            if everything:
                keeping[a.stage].add(a.microbatch)
            live[key] = (most if everything else few)[a.stage]
            now += live[key]
            peak = max(peak, now)
        elif a.kind is Kind.W or (a.kind is Kind.B and key not in deferred):
            now -= live.pop(key)
            keeping[a.stage].discard(a.microbatch)
    return peak


def recompute_bytes(job: Job) -> float:
    """What the unit under full recompute holds while its backward runs; its input is kept already. Of activations in
    host memory, two blocks' are here: those at work and those on their way.
    """
    here = 2 * block_bytes(job) if job.layout.cpu_offloading else 0.0
    if job.layout.recompute != "full":
        return here
    if pairs.are_read(job):
        return pairs.unit_bytes(job)
    unit = block_bytes(job, "none") - job.tokens * job.residual * _local_width(job)
    return here + unit * job.layout.recompute_num_layers


def _local_width(job: Job) -> float:
    return job.config.hidden_size / (job.layout.tp if job.layout.sequence_parallel else 1)


def logits_bytes(job: Job) -> float:
    """Logits at hand in the loss: a chunk of them, and a block in float32; the gradient of the whole input beside."""
    rows = job.layout.padded_vocab(job.config.vocab_size) // job.layout.tp
    chunk = min(job.output_tokens, max(16, LOSS_CHUNK // (job.element * rows))) * rows * job.element
    return float(chunk + (LOSS_BLOCK if job.element < 4 else 0))


def deferred_logits(job: Job) -> float:
    """What the output layer keeps of a microbatch for a weight gradient that is put off: its input, and the gradient
    of as many whole chunks of logits as may be kept.
    """
    rows = job.layout.padded_vocab(job.config.vocab_size) // job.layout.tp * job.element
    chunk = min(job.output_tokens, max(16, LOSS_CHUNK // rows))
    kept = min(job.output_tokens, (job.layout.deferred_logits << 20) // (chunk * rows) * chunk)
    return kept * rows + job.output_tokens * job.element * _local_width(job)


def temporaries(job: Job, parts: Sequence[StagePart]) -> float:
    """While a block's backward runs: gradients of its widest activations, and its largest weight gradient unsummed."""
    shapes = [p.shard.shape for part in parts for p in part.placed.values() if len(p.shard.shape) == 2]
    widest = max(max(s) for s in shapes if s) if shapes else 0
    inside = min(widest, 4 * job.config.hidden_size)
    weight = max((prod(s) for s in shapes), default=0) * job.element if job.element < 4 else 0
    return float(2 * job.tokens * inside * job.element + weight)


def communication(job: Job) -> float:
    """Gathered sequences under sequence parallelism, and tensors on their way between stages."""
    whole, layout = job.tokens * job.config.hidden_size * job.element, job.layout
    gathered = 2 * whole if layout.sequence_parallel else (whole if layout.tp > 1 else 0)
    share = layout.tp if layout.sequence_parallel else 1
    handed = whole * job.residual / job.element / share
    return float(gathered + (4 * handed if layout.pp > 1 else 0))
