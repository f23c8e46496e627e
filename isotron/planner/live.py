"""Bytes that exist for a moment under ZeRO-2 and 3: gathered weights, and gradients that are not reduced yet. PURE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from isotron.core.parallel.buckets import Span, unit_of
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.live import Row, staying
from isotron.planner.job import Job
from isotron.planner.parameters import StagePart

# in which a pass uses them
_ORDER = (
    *("embed", "positions", "types", "embed_norm", "encoder_bias", "layers", "encoder_norm", "decoder_bias"),
    *("final_norm", "transform", "norm", "head", "mtp_embed", "mtp"),
)


def summed_elements(part: StagePart) -> int:
    """Gradients of a stage that are not kept whole."""
    return sum(s.stop - s.start for s in part.spans if s.ways > 1 and not s.kind.frozen)


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
    return weights + (_gradients(job, table.ranks[rank], parts) if zero >= 2 else 0.0)


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


def _gradients(job: Job, row: Row, parts: Sequence[StagePart]) -> float:
    """What is formed and not reduced yet; the buckets under way, with what arrives for them."""
    spans = [s for p in parts for s in p.spans if s.ways > 1 and not s.kind.frozen]
    largest = max((s.stop - s.start for s in spans), default=0)
    flying = 3 if job.layout.overlap_grad_reduce else 1  # what arrives for one, and a whole one before it
    most = open_gradients(row, parts, job.layout.stages - 1) + flying * largest
    return float(min(most, 3 * sum(s.stop - s.start for s in spans)) * job.gradient)


def open_gradients(row: Row, parts: Sequence[StagePart], last: int) -> int:
    """Most elements of gradients that are formed and not reduced at once, where no sum is under way while another is
    formed. `last`: the number of the last stage.

    Follows the row, and in each action the parameters in the order of the backward. In the last action before a REDUCE
    a bucket goes when that action has written all of it; the others go with the REDUCE.
    """
    writes, stay = _Writes(row, parts, last), staying(row)
    live: dict[tuple[int, Span], int] = {}
    most = 0
    for place, action in enumerate(row):
        for part in action.parts:
            written = writes.of(part) if part.computes else []
            leaves = writes.completes(part) and part.stage not in stay[place]
            times, at_last = Counter(written), {home: number for number, home in enumerate(written)}
            for number, home in enumerate(written):
                live[home] = home[1].stop - home[1].start
                most = max(most, sum(live.values()))
                whole = times[home] == len(home[1].names) and at_last[home] == number
                if leaves and whole and not home[1].kind.tied:
                    live.pop(home)
        if action.kind is Kind.REDUCE:
            live = {home: size for home, size in live.items() if home[0] != action.stage}
    return most


class _Writes:
    """Which buckets an action writes, as (stage, bucket), once for every parameter in them and in order."""

    def __init__(self, row: Row, parts: Sequence[StagePart], last: int) -> None:
        self.last = last
        self.deferred = {(p.stage, p.microbatch) for a in row for p in a.parts if p.kind is Kind.W}
        spans = [(p.number, s) for p in parts for s in p.spans if s.ways > 1 and not s.kind.frozen]
        home = {(number, name): (number, span) for number, span in spans for name in span.names}
        self.homes = {p.number: {n: home[p.number, n] for n in _backward(p) if (p.number, n) in home} for p in parts}
        self.early = {n for p in parts for n, at in p.placed.items() if _is_early(n, len(at.shard.shape))}
        own = self.homes.get(last, {})
        tied = [at for at in spans if at[1].kind.tied]
        self.head = [own["head.weight"]] if "head.weight" in own else tied[:1]  # the embedding where that is tied

    def completes(self, part: Action) -> bool:
        """Whether it forms the last gradients of a microbatch."""
        return part.kind is Kind.W or (part.kind is Kind.B and (part.stage, part.microbatch) not in self.deferred)

    def of(self, part: Action) -> list[tuple[int, Span]]:
        """In the order of the backward. Where nothing waits for a W, the output layer's is formed in F."""
        later = (part.stage, part.microbatch) in self.deferred
        head = self.head if part.stage == self.last and (part.kind is Kind.W) == later else []
        if part.kind is Kind.F:
            return [] if later else head
        names = self.homes[part.stage]
        if later:
            names = {n: at for n, at in names.items() if (n in self.early) == (part.kind is Kind.B)}
        return [*names.values(), *(at for at in head if part.kind is Kind.W and at not in names.values())]


def _backward(part: StagePart) -> list[str]:
    """The parameters of a stage in the order of its backward."""
    return sorted(part.placed, key=lambda name: _place(unit_of(name)))[::-1]


def _is_early(name: str, dims: int) -> bool:
    """Whether a gradient is formed in B even where those of matrices wait for W."""
    return dims < 2 or name.split(".")[0] in ("embed", "positions", "types", "mtp_embed") or ".router." in name
