"""What comes and goes in a table under a budget: gathered weights (ZeRO-3), gradients that wait for a sum (ZeRO-2, 3).

PURE. Both budgets are of one rank and count whole stages. What is needed again last goes first, which for stages of one
size is the fewest gathers, and the fewest sums, that a row allows (Belady 1966).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule

Row = tuple[Action, ...]


def with_weights(schedule: Schedule, sizes: Mapping[int, int], budget: int) -> Schedule:
    """Adds UNSHARD and RESHARD (ZeRO-3): a stage's weights stay gathered from one use to the next while those of a rank
    together are at most `budget` elements.

    `sizes`: elements of a stage, of those stages whose rows matter. A stage that does not fit alone gets no actions: it
    gathers block by block. When room is needed, the stage that is used last of all goes. Weights are asked for one
    compute action ahead where there is room for both.
    """
    fits = {stage: size for stage, size in sizes.items() if size <= budget}
    return replace(schedule, ranks=tuple(_with_weights(row, fits, budget) for row in schedule.ranks))


def _with_weights(row: Row, sizes: Mapping[int, int], budget: int) -> Row:
    uses = [[p.stage for p in a.parts if p.kind in (Kind.F, Kind.B) and p.stage in sizes] for a in row]
    ahead: dict[int, list[int]] = defaultdict(
        list
    )  # stage -> places of its uses that are still to come, last one first
    for place in range(len(row) - 1, -1, -1):
        for stage in uses[place]:
            ahead[stage].append(place)
    live: dict[int, int] = {}
    out: list[Action] = []
    for place, action in enumerate(row):
        following = next((uses[i] for i in range(place + 1, len(row)) if row[i].computes), [])
        for stage in uses[place]:
            for gone in _leaving(live, sizes[stage] * (stage not in live), budget, ahead, uses[place]):
                out.append(Action(Kind.RESHARD, gone))
        for stage in dict.fromkeys([*uses[place], *(following if action.computes else [])]):
            if stage not in live and sum(live.values()) + sizes[stage] <= budget:
                live[stage] = sizes[stage]
                out.append(Action(Kind.UNSHARD, stage))
        out.append(action)
        for stage in uses[place]:
            ahead[stage].pop()
        done = [stage for stage in live if not ahead[stage]]
        out += [Action(Kind.RESHARD, stage) for stage in done]
        live = {stage: size for stage, size in live.items() if stage not in done}
    return tuple(out)


def _leaving(
    live: dict[int, int], more: int, budget: int, ahead: Mapping[int, list[int]], needed: list[int]
) -> Iterator[int]:
    """Takes stages out of `live` until there is room for `more` elements, those first that are needed last."""
    others = sorted((stage for stage in live if stage not in needed), key=lambda stage: ahead[stage][-1])
    while others and sum(live.values()) + more > budget:
        live.pop(others[-1])
        yield others.pop()


def with_sums(schedule: Schedule, sizes: Mapping[int, int], budget: int) -> Schedule:
    """Places REDUCE for stages whose gradients are not kept whole (ZeRO-2 and 3): behind the last gradient of every
    microbatch, but for those whose gradients may wait for the next one's, as long as those that wait on a rank are
    together at most `budget` elements.

    `sizes`: elements of a stage, of those stages whose rows matter. A table in which a stage is reduced more than once
    has chosen, and stays as it is.
    """
    if chooses_sums(schedule):
        return schedule
    return replace(schedule, ranks=tuple(_with_sums(row, sizes, budget) for row in schedule.ranks))


def chooses_sums(schedule: Schedule) -> bool:
    """Whether a table says when gradients are summed: it has a stage that is reduced more than once."""
    sums = [a.stage for row in schedule.ranks for a in row if a.kind is Kind.REDUCE]
    return len(set(sums)) < len(sums)


def _with_sums(row: Row, sizes: Mapping[int, int], budget: int) -> Row:
    bare = [a for a in row if a.kind is not Kind.REDUCE or a.stage not in sizes]
    ends = [(place, stage) for place, stage in completions(bare) if stage in sizes]
    due: dict[int, list[int]] = defaultdict(list)
    for number in _summed(ends, sizes, budget):
        place, stage = ends[number]
        while place + 1 < len(bare) and (bare[place + 1].transfers or bare[place + 1].kind is Kind.REDUCE):
            place += 1  # the other rank waits for sends
        due[place].append(stage)
    return tuple(
        each
        for place, action in enumerate(bare)
        for each in (action, *(Action(Kind.REDUCE, stage) for stage in due[place]))
    )


def completions(row: Sequence[Action]) -> list[tuple[int, int]]:
    """(place, stage) of the last gradient of every microbatch of a stage: its W, or its B without one."""
    deferred = {(p.stage, p.microbatch) for a in row for p in a.parts if p.kind is Kind.W}
    return [
        (place, p.stage)
        for place, a in enumerate(row)
        for p in a.parts
        if p.kind is Kind.W or (p.kind is Kind.B and (p.stage, p.microbatch) not in deferred)
    ]


def _summed(ends: list[tuple[int, int]], sizes: Mapping[int, int], budget: int) -> list[int]:
    """Of the last gradients of microbatches, those behind which there is a sum, by number."""
    following: list[float] = [inf] * len(ends)
    latest: dict[int, int] = {}
    for number in range(len(ends) - 1, -1, -1):
        following[number] = latest.get(ends[number][1], inf)
        latest[ends[number][1]] = number
    found: list[int] = []
    waiting: dict[int, int] = {}  # stage -> number of its last gradient so far
    for number, (_, stage) in enumerate(ends):
        waiting[stage] = number
        if following[number] == inf or sizes[stage] > budget:
            found.append(waiting.pop(stage))
        while sum(sizes[s] for s in waiting) > budget:
            found.append(waiting.pop(max(waiting, key=lambda s: following[waiting[s]])))
    return sorted(found)


def gathered(row: Row, size: list[float]) -> tuple[float, float]:
    """(most weights that UNSHARD keeps at once, weights gathered in all)."""
    live: dict[int, float] = {}
    most = total = 0.0
    for action in row:
        if action.kind is Kind.UNSHARD:
            live[action.stage] = size[action.stage]
            most, total = max(most, sum(live.values())), total + size[action.stage]
        elif action.kind is Kind.RESHARD:
            live.pop(action.stage, None)
        for part in action.parts:
            if part.kind in (Kind.F, Kind.B) and part.stage not in live:
                total += size[part.stage]
    return most, total


def waiting(row: Row, size: list[float]) -> tuple[float, float]:
    """(most gradients that wait for a later REDUCE at once, gradients reduced in all). What is reduced as it is formed,
    bucket by bucket, does not wait.
    """
    stay = staying(row)
    live: dict[int, float] = {}
    most = total = 0.0
    for place, action in enumerate(row):
        live |= {stage: size[stage] for stage in stay[place]}
        most = max(most, sum(live.values()))
        if action.kind is Kind.REDUCE:
            live.pop(action.stage, None)
            total += size[action.stage]
    return most, total


def staying(row: Row) -> dict[int, list[int]]:
    """Place -> stages whose gradients stay there until a later one is added to them."""
    ends: dict[int, list[int]] = defaultdict(list)
    for place, stage in completions(row):
        ends[place].append(stage)
    found: dict[int, list[int]] = defaultdict(list)
    summed: set[int] = set()  # stages with a REDUCE before their next gradient
    for place in range(len(row) - 1, -1, -1):
        found[place] = [stage for stage in ends[place] if stage not in summed]
        summed -= set(ends[place])
        if row[place].kind is Kind.REDUCE:
            summed.add(row[place].stage)
    return found
