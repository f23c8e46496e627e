"""A table, run on paper: proves that it is a training step that ends, and says how long and how much it takes.

PURE. A table is run under two kinds of communication, and must end under both:

tagged   Every transfer is on its own: it starts when both ends are posted, and a compute action waits only for its own
         data. This is gloo.
grouped  A run of consecutive transfers is one call. A rank's calls follow each other: the next one starts when all of
         the last one has arrived, and a compute action waits for the whole call that brings its data. This is NCCL
         with one communicator; it is stricter than a queue per pair of ranks, so what ends here ends there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.check import check, wrong
from isotron.core.parallel.pipeline.live import gathered, waiting
from isotron.core.parallel.pipeline.timeline import Costs, Key, Waits, Where, durations

__all__ = ["Costs", "Report", "Span", "simulate"]


class Span(NamedTuple):
    """A compute action with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float


class Travel(NamedTuple):
    """A tensor on its way: the SEND that names it, from and to which rank, start and end."""

    action: Action
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """What a table costs. Tuples have one entry per rank."""

    makespan: float
    """Start of the first to end of the last compute action, tagged communication; in the unit of the costs."""
    makespan_grouped: float
    """The same under grouped communication."""
    bubble: tuple[float, ...]
    """Idle time over busy time, tagged communication."""
    idle: tuple[float, ...]
    """Idle time between a rank's own first and last compute action: all that is left where steps follow each other
    without a common end. The formulas of the zero-bubble papers count this."""
    peak: tuple[float, ...]
    """Most activations alive at once: microbatches times stages, or memory if `costs.activation` says how much."""
    posted: tuple[int, ...]
    """Most receives posted and not yet used at once."""
    spans: tuple[tuple[Span, ...], ...]
    """Every compute action in time, tagged communication."""
    exposed: tuple[float, ...] = ()
    """Time that ranks wait for transfers alone: the tensor is made, the rank is free, the way is not over."""
    travels: tuple[Travel, ...] = ()
    """Every transfer in time, tagged communication."""
    gathered: tuple[float, ...] = ()
    """Most weights gathered at once by UNSHARD, in the unit of `costs.weights`; what gathers block by block is not
    among them."""
    gathers: tuple[float, ...] = ()
    """Weights gathered in all: by UNSHARD, and by each F and B without one."""
    waiting: tuple[float, ...] = ()
    """Most gradients that wait at once for a REDUCE behind those of a later microbatch, in the unit of
    `costs.gradients`; what is reduced as it is formed is not among them. Zero 0 and 1 keep all of them anyway."""
    sums: tuple[float, ...] = ()
    """Gradients reduced in all, under zero 2 and 3."""
    moments: tuple[tuple[tuple[Action, float], ...], ...] = ()
    """When UNSHARD, RESHARD and REDUCE begin, tagged communication."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Report:
    """Proves `schedule` right and measures it; raises `Refused` that names the rank and the action otherwise."""
    costs = costs or Costs()
    where = check(schedule)
    times, transfer = durations(schedule, costs, where), costs.per_stage("transfer", schedule.stages)
    paper = _Paper(schedule, times, transfer, grouped=False)
    spans, ends = _run(paper)
    grouped, _ = _run(_Paper(schedule, times, transfer, grouped=True))
    busy = [sum(end - start for _, start, end in row) for row in spans]
    makespan = _last_end(spans)
    weights = [gathered(row, costs.per_stage("weights", schedule.stages)) for row in schedule.ranks]
    gradients = [waiting(row, costs.per_stage("gradients", schedule.stages)) for row in schedule.ranks]
    return Report(
        makespan=makespan,
        makespan_grouped=_last_end(grouped),
        bubble=tuple((makespan - time) / time if time else 0.0 for time in busy),
        idle=tuple(row[-1].end - row[0].start - time if row else 0 for row, time in zip(spans, busy, strict=True)),
        peak=_peak(schedule, costs, where),
        posted=tuple(_posted(row) for row in schedule.ranks),
        spans=spans,
        exposed=_exposed(spans, paper, ends),
        travels=_travels(paper, ends),
        gathered=tuple(most for most, _ in weights),
        gathers=tuple(total for _, total in weights),
        waiting=tuple(most for most, _ in gradients),
        sums=tuple(total for _, total in gradients),
        moments=tuple(_moments(row, found) for row, found in zip(schedule.ranks, spans, strict=True)),
    )


def _last_end(spans: tuple[tuple[Span, ...], ...]) -> float:
    return max((row[-1].end for row in spans if row), default=0)


def _run(paper: _Paper) -> tuple[tuple[tuple[Span, ...], ...], list[float]]:
    """The time of every compute action, and the end of every node; refuses a table that does not end."""
    ends = paper.waits.ends()
    circle = paper.waits.circle()
    if circle:
        raise _deadlock(paper.schedule, [paper.label[node] for node in circle], paper.grouped)
    cost = paper.waits.cost
    spans = (tuple(Span(action, ends[node] - cost[node], ends[node]) for action, node in row) for row in paper.rows)
    return tuple(spans), ends


def _travels(paper: _Paper, ends: list[float]) -> tuple[Travel, ...]:
    """The transfers in time."""
    home, found = paper.schedule.placement, []
    for (forward, boundary, microbatch), node in paper.travel.items():
        stage, to = (boundary, boundary + 1) if forward else (boundary + 1, boundary)
        action = Action(Kind.SEND_F if forward else Kind.SEND_B, stage, microbatch)
        found.append(Travel(action, home[stage], home[to], ends[node] - paper.cost(node), ends[node]))
    return tuple(found)


def _exposed(spans: tuple[tuple[Span, ...], ...], paper: _Paper, ends: list[float]) -> tuple[float, ...]:
    """How long each rank waits for ways alone."""
    waited = []
    for row in spans:
        free, total = 0.0, 0.0
        for action, start, end in row:
            for node in (paper.travel.get(t) for t in map(_needs, action.parts) if t is not None):
                if node is not None and ends[node] >= start:
                    total += start - max(free, ends[node] - paper.cost(node))
                    break
            free = end
        waited.append(total)
    return tuple(waited)


Tensor = tuple[bool, int, int | None]  # what crosses a boundary: (forward, stage before the boundary, microbatch)


class _Paper:
    """Who waits for whom in one table under one kind of communication, written down rank by rank."""

    def __init__(self, schedule: Schedule, times: list[list[float]], transfer: list[float], grouped: bool) -> None:
        self.schedule, self.times, self.transfer, self.grouped = schedule, times, transfer, grouped
        self.waits = Waits()
        self.label: list[tuple[int, Action]] = []  # of every node: rank and action, for errors
        self.rows: list[list[tuple[Action, int]]] = []  # compute actions and their nodes
        self.travel: dict[Tensor, int] = {}  # the node of each transfer
        self.arrival: dict[Tensor, int] = {}  # the node to wait for before using what was received
        for rank in range(len(schedule.ranks)):
            self.rows.append(self._grouped(rank) if grouped else self._tagged(rank))
        for row in self.rows:
            for action, node in row:
                for tensor in map(_needs, action.parts):
                    if tensor in self.arrival:
                        self.waits.wait(node, self.arrival[tensor])

    def cost(self, node: int) -> float:
        """Time that a node takes."""
        return self.waits.cost[node]

    def _tagged(self, rank: int) -> list[tuple[Action, int]]:
        """A row in which a transfer waits for the computing before it and nothing waits for a transfer but its use."""
        row: list[tuple[Action, int]] = []
        for action, time in zip(self.schedule.ranks[rank], self.times[rank], strict=True):
            if action.computes:
                row.append((action, self._node(rank, action, time, row[-1][1] if row else None)))
            elif action.transfers:
                self._transfer(rank, action, row[-1][1] if row else None, None)
        return row

    def _grouped(self, rank: int) -> list[tuple[Action, int]]:
        """A row of calls: each starts after the computing and the call before it, and ends when all has arrived."""
        row: list[tuple[Action, int]] = []
        start = end = None  # of the latest call
        open_call = False
        for action, time in zip(self.schedule.ranks[rank], self.times[rank], strict=True):
            if not action.transfers:
                open_call = False
                if action.computes:
                    row.append((action, self._node(rank, action, time, row[-1][1] if row else None)))
                continue
            if not open_call:
                start = self._node(rank, action, 0, row[-1][1] if row else None, end)
                end = self._node(rank, action, 0)
                open_call = True
            self._transfer(rank, action, start, end)
        return row

    def _node(self, rank: int, action: Action, cost: float, *after: int | None) -> int:
        """A node that starts `after` others and is named `action` in errors."""
        self.label.append((rank, action))
        node = self.waits.node(cost)
        for before in after:
            if before is not None:
                self.waits.wait(node, before)
        return node

    def _transfer(self, rank: int, action: Action, start: int | None, end: int | None) -> None:
        """One end of a transfer: it waits for `start`, and `end` (the end of its call, if it has one) waits for it."""
        kind = action.kind
        behind = kind is Kind.SEND_F or kind is Kind.RECV_B  # over the boundary behind the stage, or the one before it
        forward = kind is Kind.SEND_F or kind is Kind.RECV_F
        tensor = forward, action.stage if behind else action.stage - 1, action.microbatch
        node = self.travel.get(tensor)
        if node is None:
            node = self.travel[tensor] = self._node(rank, action, self.transfer[tensor[1]])
        if start is not None:
            self.waits.wait(node, start)
        if end is not None:
            self.waits.wait(end, node)
        if kind is Kind.RECV_F or kind is Kind.RECV_B:
            self.arrival[tensor] = node if end is None else end


def _needs(part: Action) -> Tensor | None:
    """What a compute action uses of the next or previous stage, on whatever rank that is."""
    if part.kind is Kind.F:
        return True, part.stage - 1, part.microbatch
    return (False, part.stage, part.microbatch) if part.kind is Kind.B else None


def _deadlock(schedule: Schedule, circle: list[tuple[int, Action]], grouped: bool) -> Exception:
    """The error that shows who waits for whom."""
    steps = [f"rank {rank} {action}" for rank, action in circle]
    steps = [step for i, step in enumerate(steps) if step != steps[i - 1]]
    shown = " waits for ".join([*steps[:8], *(["..."] if len(steps) > 8 else []), steps[0]])
    kind = "in grouped calls" if grouped else "with tagged transfers"
    fix = "post the receive of the first of them later, or send earlier; `with_communication` places both"
    return wrong(schedule, circle[0][0], str(circle[0][1]), f"deadlock {kind}: {shown}", fix)


def _peak(schedule: Schedule, costs: Costs, where: dict[Key, Where]) -> tuple[float, ...]:
    """Most that each rank keeps at once: from F to the last gradient of the same stage and microbatch."""
    size = costs.per_stage("activation", schedule.stages)
    peaks = []
    for rank in range(len(schedule.ranks)):
        live = peak = 0.0
        for _, part in schedule.parts(rank):
            if part.kind is Kind.F:
                live += size[part.stage]
                peak = max(peak, live)
            elif part.kind is Kind.W or (part.kind is Kind.B and (Kind.W, part.stage, part.microbatch) not in where):
                live -= size[part.stage]
        peaks.append(peak)
    return tuple(peaks)


def _moments(row: tuple[Action, ...], spans: tuple[Span, ...]) -> tuple[tuple[Action, float], ...]:
    """What concerns whole stages begins when the rank has computed what stands before it."""
    now, computed, found = 0.0, iter(spans), []
    for action in row:
        if action.computes:
            now = next(computed).end
        elif not action.transfers:
            found.append((action, now))
    return tuple(found)


def _posted(row: tuple[Action, ...]) -> int:
    """Most receives of one rank that wait for their use at once."""
    posted: set[tuple[Kind, int, int | None]] = set()
    most = 0
    for action in row:
        if action.kind is Kind.RECV_F or action.kind is Kind.RECV_B:
            posted.add((Kind.F if action.kind is Kind.RECV_F else Kind.B, action.stage, action.microbatch))
            most = max(most, len(posted))
        elif action.computes:
            posted.difference_update((part.kind, part.stage, part.microbatch) for part in action.parts)
    return most
