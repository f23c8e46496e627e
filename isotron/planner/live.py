"""Bytes that exist for a moment under ZeRO-2 and 3: gathered weights, and gradients that are not reduced yet. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from isotron.core.parallel.buckets import unit_of
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.planner.job import Job
from isotron.planner.parameters import StagePart

_ORDER = ("embed", "positions", "layers", "norm", "head", "mtp_embed", "mtp")  # in which a pass uses them


def gathered_elements(part: StagePart) -> dict[str, int]:
    """Weights of a stage that come and go, by unit, in the order of use."""
    sizes: dict[str, int] = {}
    for span in part.spans:
        if span.ways > 1:
            for name in span.names:
                size = prod(part.placed[name].shard.shape)
                sizes[unit_of(name)] = sizes.get(unit_of(name), 0) + size
    return dict(sorted(sizes.items(), key=lambda item: _place(item[0])))


def _place(unit: str) -> tuple[int, int]:
    first, _, number = unit.partition(".")
    return _ORDER.index(first), int(number or 0)


def live_bytes(job: Job, table: Schedule, rank: int, parts: Sequence[StagePart]) -> float:
    """Gathered weights and open gradients of a pipeline rank at the worst moment; `table` says which stages stay."""
    zero = job.layout.zero_stage
    weights = _weights(job, table.ranks[rank], {p.number: gathered_elements(p) for p in parts}) if zero == 3 else 0.0
    return weights + (_gradients(job, parts) if zero >= 2 else 0.0)


def _weights(job: Job, row: Sequence[Action], units: Mapping[int, Mapping[str, int]]) -> float:
    """The stages that the table holds, and of the one that is computed a unit and, if it is prefetched, the next."""
    live: dict[int, int] = {}
    most = 0
    for action in row:
        match action.kind:
            case Kind.UNSHARD:
                live[action.stage] = sum(units[action.stage].values())
            case Kind.RESHARD:
                live.pop(action.stage)
        for part in action.parts:
            passing = part.kind in (Kind.F, Kind.B) and part.stage not in live
            most = max(most, sum(live.values()) + (_passing(job, [*units[part.stage].values()]) if passing else 0))
    return float(most * job.element)


def _passing(job: Job, sizes: list[int]) -> int:
    pairs = [a + b for a, b in zip(sizes, sizes[1:], strict=False)] if job.layout.overlap_param_gather else []
    return max([*sizes, *pairs], default=0)


def _gradients(job: Job, parts: Sequence[StagePart]) -> float:
    """One bucket that fills; those under way, with what arrives for them; what is tied waits for the stage's end."""
    spans = [s for p in parts for s in p.spans if s.ways > 1]
    largest = max((s.stop - s.start for s in spans), default=0)
    tied = sum(s.stop - s.start for s in spans if s.kind.tied)
    flying = 2 if job.layout.overlap_grad_reduce else 1
    return float(min((1 + 2 * flying) * largest + tied, 3 * sum(s.stop - s.start for s in spans)) * job.gradient)
