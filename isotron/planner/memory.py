"""Bytes on a rank, by kind. PURE.

Weights, gradients, masters and moments are exact: the shapes of the layout table, cut by the functions that cut the
real buffers. Activations come from `activations.py` and the real pipeline table. The rest is what an implementation
needs for a moment: logits of a chunk, a recomputed unit, buffers of communication, the context of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

from isotron.core.parallel.pipeline.actions import Kind, Schedule
from isotron.core.parallel.plan import Layout
from isotron.planner.activations import block_bytes, stage_bytes
from isotron.planner.job import Job
from isotron.planner.parameters import StagePart, rank_stages

LOSS_CHUNK = 64 << 20  # bytes of logits at hand (core/nn/loss.py)
LOSS_BLOCK = 4 << 20  # bytes of logits in float32 at hand
KINDS = (
    *("weights", "gradients", "masters", "moments", "activations", "recompute", "logits", "temporaries"),
    *("communication", "context"),
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
    communication: float = 0  # gathered sequences, tensors between stages
    context: float = 0  # driver, kernels, communicators

    @property
    def states(self) -> float:
        """Weights, gradients, masters and moments."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> float:
        """All kinds."""
        return sum(getattr(self, f.name) for f in fields(self))


def states(job: Job, parts: Sequence[StagePart], dp_rank: int | None = None) -> Bytes:
    """The exact bytes of a rank's state; without `dp_rank` those of the data-parallel rank that has most."""
    layout, zero = job.layout, job.layout.zero_stage
    whole = sum(p.elements for p in parts)
    ranks = range(layout.data_ranks) if dp_rank is None else (dp_rank,)
    own = max(sum(p.run(*_runs(layout, rank)) for p in parts) for rank in ranks)
    weights, gradients = (whole if zero < 3 else own), (whole if zero < 2 else own)
    masters = own * job.wide if job.wide != job.element else 0
    return Bytes(weights * job.element, gradients * job.wide, masters, 2 * own * job.wide)


def _runs(layout: Layout, dp_rank: int) -> tuple[int, int]:
    """Which runs of what all tokens pass and of experts the first tensor-parallel rank of a data-parallel one steps."""
    copy = dp_rank * layout.tp // (layout.expert_tp * layout.ep)
    return dp_rank % layout.shard_ranks, copy % layout.expert_shard_ranks


def plan_memory(job: Job, context: float = 0.0) -> list[Bytes]:
    """Bytes of every pipeline rank (the tensor-parallel ranks of one stage hold the same)."""
    table = job.table()
    every = [rank_stages(job.config, job.layout, r) for r in range(job.layout.pp)]
    kept = activation_peaks(job, table, every)
    return [_whole(job, states(job, parts), parts, kept[r], context) for r, parts in enumerate(every)]


def _whole(job: Job, state: Bytes, parts: Sequence[StagePart], activations: float, context: float) -> Bytes:
    last = any(p.number == job.layout.stages - 1 for p in parts)
    return Bytes(
        state.weights,
        state.gradients,
        state.masters,
        state.moments,
        activations,
        recompute_bytes(job),
        logits_bytes(job) if last else 0.0,
        temporaries(job, parts),
        communication(job),
        context,
    )


def activation_peaks(job: Job, table: Schedule, every: Sequence[Sequence[StagePart]]) -> list[float]:
    """Most bytes that each pipeline rank keeps at once, following the table row by row."""
    last = job.layout.stages - 1
    full = job.layout.recompute == "full"
    keep = job.layout.recompute_keep if full else 0
    peaks = []
    for rank, parts in enumerate(every):
        few = {p.number: stage_bytes(job, len(p.layers), p.number == 0, p.number == last) for p in parts}
        most = few
        if keep:
            most = {p.number: stage_bytes(job, len(p.layers), p.number == 0, p.number == last, "none") for p in parts}
        peaks.append(_peak(table, rank, few, most, keep))
    return peaks


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
    """What the unit under full recompute holds while its backward runs; its input is kept already."""
    if job.layout.recompute != "full":
        return 0.0
    return (block_bytes(job, "none") - job.tokens * job.element * _local_width(job)) * job.layout.recompute_num_layers


def _local_width(job: Job) -> float:
    return job.config.hidden_size / (job.layout.tp if job.layout.sequence_parallel else 1)


def logits_bytes(job: Job) -> float:
    """Logits at hand in the loss: a chunk of them, and a block in float32; the gradient of the whole input beside."""
    rows = job.layout.padded_vocab(job.config.vocab_size) // job.layout.tp
    chunk = min(job.tokens, max(16, LOSS_CHUNK // (job.element * rows))) * rows * job.element
    return float(chunk + (LOSS_BLOCK if job.element < 4 else 0))


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
    return float(gathered + (4 * whole / share if layout.pp > 1 else 0))
