"""`auto`: the shortest table that a memory limit allows, for given costs.

PURE. A heuristic, not a solver: every hand-written schedule that fits is a candidate, and so are tables that a list
scheduler writes under the real costs with different preferences, and the best of all with its weight gradients placed
anew. The shortest is taken; so it is never longer than the best hand-written one that fits. Costs are those of a whole
rank's layers, of which each of its v stages has 1/v, or of every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from isotron.core.errors import Refused, refuse
from isotron.core.parallel.pipeline.actions import Schedule
from isotron.core.parallel.pipeline.greedy import greedy
from isotron.core.parallel.pipeline.passes import with_communication, with_reduce
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.pipeline.simulate import Costs, Report, simulate
from isotron.core.parallel.pipeline.vshape import vee
from isotron.core.parallel.pipeline.weights import place_weights


@dataclass(frozen=True)
class Found:
    """The best table, its simulation under the costs of its stages, and every candidate's (name, time, peak)."""

    table: Schedule
    report: Report
    tried: tuple[tuple[str, float, float], ...]


def stage_costs(costs: Costs, v: int) -> Costs:
    """Costs of every stage: of those given as one number for a whole rank each of its v stages has 1/v.

    Transfers are not divided. What is given per stage stays as it is.
    """
    parts = {
        f: getattr(costs, f) / v
        for f in ("forward", "backward", "weight", "activation")
        if not isinstance(getattr(costs, f), Sequence)
    }
    return costs if v == 1 else replace(costs, **parts)


def fits(costs: Costs, stages: int) -> bool:
    """Whether costs that are given per stage are given for this many."""
    given = (getattr(costs, f.name) for f in fields(costs))
    return all(len(value) == stages for value in given if isinstance(value, Sequence))


def search(p: int, m: int, costs: Costs, memory: float, placements: tuple[tuple[int, ...], ...] = ()) -> Found:
    """The best table of any placement (or one of `placements`) whose ranks keep at most `memory`.

    `memory` has the unit of `costs.activation`, which is what one microbatch keeps of a whole rank's layers. Costs that
    are given per stage leave only the placements with as many stages.
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
    for name, v in product(SCHEDULES, (1, 2, 3)):
        kind = SCHEDULES[name].per_rank
        if {"one": v == 1, "two": v == 2, "several": v > 1}[kind] and fits(costs, p * v):
            for group in dict.fromkeys((0, p // 2, 2 * p)) if name == "interleaved" and m > p else (0,):
                table = SCHEDULES[name].make(p, m, v, group)
                if table.placement in wanted:
                    yield table
                    yield from _reweighted(table, stage_costs(costs, v), memory)
    for home, forwards_first, patience in product(wanted, (False, True), (1.0, 0.5, 0.0)):
        if fits(costs, len(home)):
            own = stage_costs(costs, len(home) // p)
            written = greedy(home, m, own, memory, forwards_first, patience)
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
