"""A list scheduler: writes a table under given costs and a memory limit. PURE."""

from __future__ import annotations

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.timeline import Costs, Key
from isotron.core.parallel.pipeline.weights import arrival, touched


def greedy(
    home: tuple[int, ...], m: int, costs: Costs, memory: float, forwards_first: bool, patience: float
) -> Schedule | None:
    """A list scheduler: whatever can start first, starts; None when the memory leaves it stuck.

    `forwards_first`: which of two that can start together. `patience`: how much of a weight gradient's time a rank
    waits before it starts one.
    """
    run = _Greedy(home, m, costs, memory, forwards_first, patience)
    options = [run.choose(rank) for rank in range(len(run.rows))]
    for _ in range(3 * m * len(home)):
        best = min((option for option in options if option is not None), default=None, key=lambda option: option[:4])
        if best is None:
            return None
        run.do(best[0], best[1], best[-1])
        for rank in touched(best[-1].stage, home):
            options[rank] = run.choose(rank)
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
