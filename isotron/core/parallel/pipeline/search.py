"""`auto`: the shortest table that a memory limit allows, for given costs.

PURE. A heuristic, not a solver: every hand-written schedule that fits is a candidate, and so are tables that a list
scheduler writes under the real costs with different preferences, and the best of all with its weight gradients placed
anew. The shortest is taken; so it is never longer than the best hand-written one that fits. Costs are those of a whole
rank's layers; a rank with v stages has stages of 1/v of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from isotron.core.errors import Refused, refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.passes import with_communication, with_reduce
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.pipeline.simulate import Costs, Report, simulate
from isotron.core.parallel.pipeline.timeline import Key
from isotron.core.parallel.pipeline.vshape import vee
from isotron.core.parallel.pipeline.weights import arrival, place_weights


@dataclass(frozen=True)
class Found:
    """The best table, its simulation under the costs of its stages, and every candidate's (name, time, peak)."""

    table: Schedule
    report: Report
    tried: tuple[tuple[str, float, float], ...]


def stage_costs(costs: Costs, v: int) -> Costs:
    """Costs of one of v stages, from those of a whole rank (numbers, not sequences)."""
    if v == 1:
        return costs
    parts = {f: getattr(costs, f) / v for f in ("forward", "backward", "weight", "activation")}
    return replace(costs, **parts)


def search(p: int, m: int, costs: Costs, memory: float, placements: tuple[tuple[int, ...], ...] = ()) -> Found:
    """The best table of any placement (or one of `placements`) whose ranks keep at most `memory`.

    `memory` has the unit of `costs.activation`, which is what one microbatch keeps of a whole rank's layers.
    """
    tried, best = [], None
    for table in _candidates(p, m, costs, memory, placements):
        v = table.stages // p
        complete = with_reduce(with_communication(table))
        report = simulate(complete, stage_costs(costs, v))
        if max(report.peak) > memory * (1 + 1e-9):
            continue
        tried.append((table.name, report.makespan, max(report.peak)))
        if best is None or (report.makespan, max(report.peak)) < (best[1].makespan, max(best[1].peak)):
            best = complete, report
    if best is None:
        case = f"no table for {p} ranks and {m} microbatches keeps that little"
        raise refuse(f"--schedule auto --schedule-memory {memory:g}", case, f"--schedule-memory {p}")
    return Found(best[0], best[1], tuple(sorted(tried, key=lambda t: t[1:])))


def _candidates(
    p: int, m: int, costs: Costs, memory: float, placements: tuple[tuple[int, ...], ...]
) -> Iterator[Schedule]:
    wanted = placements or (tuple(range(p)), vee(p), tuple(range(p)) * 2)
    for entry, v in product(SCHEDULES.values(), (1, 2, 3)):
        if {"one": v == 1, "two": v == 2, "several": v > 1}[entry.per_rank]:
            table = entry.make(p, m, v, 0)
            if table.placement in wanted:
                yield table
                yield from _reweighted(table, stage_costs(costs, v), memory)
    for home, forwards_first, patience in product(wanted, (False, True), (1.0, 0.5, 0.0)):
        written = greedy(home, m, stage_costs(costs, len(home) // p), memory, forwards_first, patience)
        if written is not None:
            yield written


def _reweighted(table: Schedule, costs: Costs, memory: float) -> Iterator[Schedule]:
    """The table with its weight gradients where these costs have gaps, if it ends within the memory."""
    if any(action.also for row in table.ranks for action in row):
        return
    try:
        yield replace(place_weights(table, memory * (1 + 1e-9), costs), name=f"{table.name}+w")
    except Refused:
        return  # not a candidate


def greedy(
    home: tuple[int, ...], m: int, costs: Costs, memory: float, forwards_first: bool, patience: float
) -> Schedule | None:
    """A list scheduler: whatever can start first, starts; None when the memory leaves it stuck.

    `forwards_first`: which of two that can start together. `patience`: how much of a weight gradient's time a rank
    waits before it starts one.
    """
    run = _Greedy(home, m, costs, memory, forwards_first, patience)
    for _ in range(3 * m * len(home)):
        best = min((c for rank in range(len(run.rows)) if (c := run.choose(rank)) is not None), default=None)
        if best is None:
            return None
        run.do(best[0], best[1], best[-1])
    return Schedule("searched", tuple(map(tuple, run.rows)), home, m)


class _Greedy:
    """The state of the list scheduler."""

    def __init__(
        self, home: tuple[int, ...], m: int, costs: Costs, memory: float, forwards_first: bool, patience: float
    ) -> None:
        stages, ranks = len(home), max(home) + 1
        self.home, self.m, self.memory, self.patience = home, m, memory * (1 + 1e-9), patience
        self.rank_order = {Kind.F: int(not forwards_first), Kind.B: int(forwards_first)}
        forward, backward, weight = (costs.per_stage(f, stages) for f in ("forward", "backward", "weight"))
        inputs = [b - w for b, w in zip(backward, weight, strict=True)]
        self.cost = {Kind.F: forward, Kind.B: inputs, Kind.W: weight}
        self.way, self.size = costs.per_stage("transfer", stages), costs.per_stage("activation", stages)
        self.own = [[s for s in range(stages) if home[s] == r] for r in range(ranks)]
        # room that a forward must leave, so that its microbatch can go through the rank's later stages
        self.room = [sum(self.size[t] for t in self.own[home[s]] if t > s) for s in range(stages)]
        self.count = {Kind.F: [0] * stages, Kind.B: [0] * stages}
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.owed: list[list[Action]] = [[] for _ in range(ranks)]
        self.free, self.live = [0.0] * ranks, [0.0] * ranks
        self.done: dict[Key, float] = {}

    def choose(self, rank: int) -> tuple[float, int, int, int, Action] | None:
        """(start, rank, preference, stage, action) of the best next action of a rank."""
        options = []
        for kind in (Kind.F, Kind.B):
            for s in self.own[rank]:
                i = self.count[kind][s]
                full = kind is Kind.F and self.live[rank] + self.size[s] + self.room[s] > self.memory
                if i == self.m or full:
                    continue
                action = Action(kind, s, i)
                ready = arrival(action, self.home, self.done, self.way)
                if ready is not None:
                    options.append((max(ready, self.free[rank]), rank, self.rank_order[kind], -s, action))
        best = min(options, key=lambda option: option[:4], default=None)
        if self.owed[rank]:
            weight = self.owed[rank][0]
            gap = 0 if best is None else best[0] - self.free[rank]
            if best is None or (gap > 0 and gap >= self.patience * self.cost[Kind.W][weight.stage]):
                return self.free[rank], rank, 2, 0, weight
        return best

    def do(self, start: float, rank: int, action: Action) -> None:
        """Carry the action out."""
        self.rows[rank].append(action)
        end = start + self.cost[action.kind][action.stage]
        self.done[action.kind, action.stage, action.microbatch] = self.free[rank] = end
        if action.kind is Kind.W:
            self.owed[rank].pop(0)
            self.live[rank] -= self.size[action.stage]
            return
        self.count[action.kind][action.stage] += 1
        if action.kind is Kind.F:
            self.live[rank] += self.size[action.stage]
        else:
            self.owed[rank].append(Action(Kind.W, action.stage, action.microbatch))
