"""When to compute weight gradients: in gaps, and when memory asks for it.

PURE. `place_weights` takes a table whose forwards and backwards are in order and places a W for every B: wherever a
rank would otherwise wait at least as long, and before a forward that the memory limit does not let through. A B that is
ready always goes first, since the ranks before it wait for it.
"""

from __future__ import annotations

from collections import deque

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.timeline import Costs, Key

UNIT = Costs(forward=1, backward=2, weight=1)


def place_weights(schedule: Schedule, limit: float, costs: Costs = UNIT) -> Schedule:
    """The table with every backward split; `limit`: most activations (microbatches x stages) that a rank keeps.

    Refuses a limit under which the order cannot end.
    """
    run = _Run(schedule, limit, costs)
    steps = [run.next(rank) for rank in range(len(run.rows))]
    while run.left:
        step = min((s for s in steps if s is not None), default=None, key=lambda s: s[:2])
        if step is None:
            case = "under this limit ranks wait for each other in a circle"
            raise refuse(f"table {schedule.name} with at most {limit:g} activations", case, "a higher limit")
        run.do(*step)
        for rank in touched(step[2].stage, schedule.placement):
            steps[rank] = run.next(rank)
    return Schedule(schedule.name, tuple(map(tuple, run.rows)), schedule.placement, schedule.microbatches)


class _Run:
    """The table, played through in time."""

    def __init__(self, schedule: Schedule, limit: float, costs: Costs) -> None:
        self.schedule, self.limit = schedule, limit
        stages = schedule.stages
        self.cost = {kind: costs.per_stage(kind_field, stages) for kind, kind_field in _FIELDS.items()}
        self.cost[Kind.B] = [b - w for b, w in zip(self.cost[Kind.B], self.cost[Kind.W], strict=True)]
        self.way = costs.per_stage("transfer", stages)
        self.size = costs.per_stage("activation", stages)
        self.order = [deque(a for a in row if a.kind in (Kind.F, Kind.B)) for row in schedule.ranks]
        self.rows: list[list[Action]] = [[] for _ in schedule.ranks]
        self.owed: list[deque[Action]] = [deque() for _ in schedule.ranks]
        self.free = [0.0] * len(self.rows)
        self.live = [0.0] * len(self.rows)
        self.done: dict[Key, float] = {}
        self.left = sum(len(row) + sum(a.kind is Kind.B for a in row) for row in self.order)

    def next(self, rank: int) -> tuple[float, int, Action] | None:
        """(start, rank, action) of what the rank does next; None when it can do nothing."""
        found = None
        if self.order[rank]:
            action = self.order[rank][0]
            ready = arrival(action, self.schedule.placement, self.done, self.way)
            full = action.kind is Kind.F and self.live[rank] + self.size[action.stage] > self.limit
            if ready is not None and not full:
                found = max(ready, self.free[rank]), rank, action
        if self.owed[rank]:
            weight = self.owed[rank][0]
            if found is None or found[0] - self.free[rank] >= self.cost[Kind.W][weight.stage]:
                return self.free[rank], rank, weight
        return found

    def do(self, start: float, rank: int, action: Action) -> None:
        """Carry the action out."""
        self.rows[rank].append(action)
        self.left -= 1
        end = start + self.cost[action.kind][action.stage]
        self.done[action.kind, action.stage, action.microbatch] = self.free[rank] = end
        if action.kind is Kind.W:
            self.owed[rank].popleft()
            self.live[rank] -= self.size[action.stage]
            return
        self.order[rank].popleft()
        if action.kind is Kind.F:
            self.live[rank] += self.size[action.stage]
        else:
            self.owed[rank].append(Action(Kind.W, action.stage, action.microbatch))


_FIELDS = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight"}


def touched(stage: int, placement: tuple[int, ...]) -> set[int]:
    """The ranks whose next action may be another once something of a stage is done: its own and its neighbours'."""
    return {placement[s] for s in (stage - 1, stage, stage + 1) if 0 <= s < len(placement)}


def arrival(action: Action, placement: tuple[int, ...], done: dict[Key, float], way: list[float]) -> float | None:
    """When the input of a forward or backward is there; None if what makes it has not run."""
    s, m = action.stage, action.microbatch
    if action.kind is Kind.F:
        if s == 0:
            return 0.0
        end, boundary, peer = done.get((Kind.F, s - 1, m)), s - 1, s - 1
    elif s == len(placement) - 1:
        return done.get((Kind.F, s, m))
    else:
        end, boundary, peer = done.get((Kind.B, s + 1, m)), s, s + 1
    if end is None or (action.kind is Kind.B and (Kind.F, s, m) not in done):
        return None
    return end + (way[boundary] if placement[peer] != placement[s] else 0)
