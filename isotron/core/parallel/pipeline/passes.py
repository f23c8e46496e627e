"""From a table of compute actions to a table that can run: transfers and reductions.

PURE. Notable: how transfers are placed, and why nobody can wait for ever.

Take a timeline of the bare table under nominal costs. Give each transfer one instant on it, not before its tensor is
made and not after it is used, and let *both* ranks file it at that instant: after what they finish by then, before
what they finish later. Then whatever the real costs are, every action waits only for things with an earlier instant (or
the same instant and an earlier kind: computing, call, arrival), so there is no circle of waits. That holds even if each
call is waited for at once, and if a rank's calls can only follow each other.

Within that freedom a receive is posted one compute action ahead of its use, so that it overlaps with computing, but not
in the call that brings the input of that very action, which would then wait for both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from math import inf

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.timeline import Costs, Crossing, Key, Waits, Where, crossings, durations, places

NOMINAL = Costs(forward=2, backward=4, weight=2, transfer=1)  # whole numbers: ties are real ties


def with_reduce(schedule: Schedule) -> Schedule:
    """Adds REDUCE for each stage after its last weight gradient, behind the sends that follow: they are waited for."""
    rows = []
    for rank, row in enumerate(schedule.ranks):
        last: dict[int, int] = {}
        for position, part in schedule.parts(rank):
            if part.kind in (Kind.B, Kind.W):
                last[part.stage] = position
        due: dict[int, list[int]] = defaultdict(list)
        for stage, position in last.items():
            while position + 1 < len(row) and row[position + 1].transfers:
                position += 1
            due[position].append(stage)
        rows.append(
            tuple(
                each
                for position, action in enumerate(row)
                for each in (action, *(Action(Kind.REDUCE, stage) for stage in due[position]))
            )
        )
    return Schedule(schedule.name, tuple(rows), schedule.placement, schedule.microbatches)


def with_communication(schedule: Schedule) -> Schedule:
    """Adds SEND and RECV for every tensor that goes from one rank to another; refuses a table that has some."""
    if any(action.transfers for row in schedule.ranks for action in row):
        raise refuse(f"transfers for table {schedule.name}", "it has transfers already", "a table of compute actions")
    bare = Schedule(
        schedule.name,
        tuple(tuple(a for a in row if a.computes) for row in schedule.ranks),
        schedule.placement,
        schedule.microbatches,
    )
    calls = _calls(bare)
    rows = []
    for rank, row in enumerate(schedule.ranks):
        out = list(calls[rank, 0])
        done = 0
        for action in row:
            out.append(action)
            if action.computes:
                done += 1
                out += calls[rank, done]
        rows.append(tuple(out))
    return Schedule(schedule.name, tuple(rows), schedule.placement, schedule.microbatches)


def _calls(bare: Schedule) -> dict[tuple[int, int], list[Action]]:
    """The transfers of each call: (rank, number of compute actions before it) -> actions in order."""
    where = places(bare)
    travels = [t for t in crossings(bare) if t.producer in where and t.consumer in where]
    ends = _ends(bare, where, travels)
    calls: dict[tuple[int, int], list[tuple[tuple[int, bool, int, str, int], Action]]] = defaultdict(list)
    stalls: dict[int, set[int]] = defaultdict(set)  # rank -> compute actions that wait for the call right before them
    for travel in sorted(travels, key=lambda t: where[t.consumer]):
        (source, made), (target, used) = where[travel.producer], where[travel.consumer]
        gap = _gap(ends[source], made, ends[target], used, stalls[target])
        if gap == used:
            stalls[target].add(used)
        order = made, travel.send[0].value, travel.boundary
        calls[source, made + 1].append(((target, False, *order), Action(*travel.send)))
        calls[target, gap].append(((source, True, *order), Action(*travel.receive)))
    result: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for place, items in calls.items():
        # by peer, its sends and receives side by side; in one direction in the order of making, the same at both ends
        result[place] = [action for _, action in sorted(items, key=lambda item: item[0])]
    return result


def _gap(source: list[float], made: int, target: list[float], used: int, stalls: set[int]) -> int:
    """How many compute actions the receiver does before it posts; both rows are given by their end times.

    Allowed instants: from the end of the producer to the end of what its rank computes next, so that the send follows
    the producer directly. Preferred among them: one ahead, then right before the use, then further ahead.
    """
    first = bisect_right(target, source[made])
    limit = source[made + 1] if made + 1 < len(source) else inf
    last = min(used, bisect_left(target, limit))
    preferred: list[int] = [used - 1, used, *range(used - 2, first - 1, -1)]
    for gap in preferred:
        if first <= gap <= last and (gap == used or gap not in stalls):
            return gap
    return last


def _ends(bare: Schedule, where: dict[Key, Where], travels: list[Crossing]) -> list[list[float]]:
    """End of every compute action on the nominal timeline."""
    waits = Waits()
    nodes = [[waits.node(time) for time in row] for row in durations(bare, NOMINAL, where)]
    for row in nodes:
        for before, after in zip(row, row[1:], strict=False):
            waits.wait(after, before)
    way = NOMINAL.per_stage("transfer", bare.stages)
    for travel in travels:
        (source, made), (target, used) = where[travel.producer], where[travel.consumer]
        node = waits.node(way[travel.boundary])
        waits.wait(node, nodes[source][made])
        waits.wait(nodes[target][used], node)
    ends = waits.ends()
    if waits.circle():
        raise refuse(f"transfers for table {bare.name}", "its ranks wait for each other in a circle", "another order")
    return [[ends[node] for node in row] for row in nodes]
