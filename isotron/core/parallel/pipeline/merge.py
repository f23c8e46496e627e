"""Forwards in one order and backwards in another, merged as they become ready in time. PURE.

For orders in which the two cannot simply alternate, because a rank now and then waits for its next forward longer than
it should wait for a backward that is ready.
"""

from __future__ import annotations

from collections.abc import Sequence

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.timeline import Key
from isotron.core.parallel.pipeline.weights import arrival, touched

TIME = {Kind.F: 1.0, Kind.B: 2.0}
Row = Sequence[Action]


def merged(
    name: str, forward: Sequence[Row], backward: Sequence[Row], limits: Sequence[int], placement: tuple[int, ...]
) -> Schedule:
    """Whatever can start first starts, a backward before a forward; rank r never keeps more than `limits[r]`.

    Refuses limits under which the orders cannot end.
    """
    run = _Merge(forward, backward, limits, placement)
    left = sum(map(len, forward)) + sum(map(len, backward))
    for _ in range(left):
        start, _, rank, action = min((option for option in run.options if option is not None), default=(0, 0, -1, None))
        if action is None:
            raise refuse(
                f"table {name} with at most {max(limits)} activations", "ranks wait in a circle", "a higher limit"
            )
        run.do(start, rank, action)
    microbatches = 1 + max(int(a.microbatch or 0) for row in forward for a in row)
    return Schedule(name, tuple(map(tuple, run.rows)), placement, microbatches)


Option = tuple[float, int, int, Action]  # start, 0 for a backward and 1 for a forward, rank, action


class _Merge:
    """Both orders, played through in time. `options`: what each rank does next; looked up anew beside a change."""

    def __init__(
        self, forward: Sequence[Row], backward: Sequence[Row], limits: Sequence[int], placement: tuple[int, ...]
    ) -> None:
        self.orders, self.limits, self.placement = (backward, forward), limits, placement
        ranks = range(len(forward))
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.count = [[0, 0] for _ in ranks]  # backwards, forwards done
        self.free = [0.0 for _ in ranks]
        self.done: dict[Key, float] = {}
        self.way = [0.0] * len(placement)
        self.options = [self.next(rank) for rank in ranks]

    def next(self, rank: int) -> Option | None:
        """What the rank can start first."""
        best: Option | None = None
        for kind in (0, 1):
            number = self.count[rank][kind]
            full = kind == 1 and number - self.count[rank][0] >= self.limits[rank]
            if full or number == len(self.orders[kind][rank]):
                continue
            action = self.orders[kind][rank][number]
            ready = arrival(action, self.placement, self.done, self.way)
            if ready is not None and (best is None or max(ready, self.free[rank]) < best[0]):
                best = max(ready, self.free[rank]), kind, rank, action
        return best

    def do(self, start: float, rank: int, action: Action) -> None:
        """Carry the action out."""
        self.rows[rank].append(action)
        self.count[rank][action.kind is Kind.F] += 1
        self.free[rank] = self.done[action.kind, action.stage, action.microbatch] = start + TIME[action.kind]
        for near in touched(action.stage, self.placement):
            self.options[near] = self.next(near)
