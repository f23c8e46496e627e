"""When things happen: costs of actions, who waits for whom, and the earliest times that follow.

PURE. Notable: time is the longest path through a graph of waits, found in one pass over its edges; a wait that closes a
circle is a deadlock and is returned as the circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What actions cost, in any unit of time; each a number, or one number per stage.

    Whole numbers stay whole, so that times can be compared exactly. An overlapped pair costs the sum of its parts.
    """

    forward: PerStage = 1
    backward: PerStage = 2
    """Input and weight gradient together: a B without a W."""
    weight: PerStage = 1
    """The share of `backward` that moves to the W where the table has one."""
    transfer: PerStage = 0
    """The way over the boundary behind a stage, in either direction; the last stage's number is not used."""
    activation: PerStage = 1
    """What a microbatch keeps from its F to its last gradient, in any unit of memory."""
    weights: PerStage = 1
    """What gathering a stage brings, in any unit of memory."""
    gradients: PerStage = 1
    """What the gradients of a stage take until they are reduced, in any unit of memory."""

    def per_stage(self, field: str, stages: int) -> list[float]:
        """The cost `field` of every stage; refuses a sequence of another length."""
        value = getattr(self, field)
        if not isinstance(value, Sequence):
            return [value] * stages
        if len(value) != stages:
            given = f"costs.{field} with {len(value)} numbers"
            raise refuse(given, f"the table has {stages} stages", f"one number, or {stages}, one per stage")
        return list(value)


class Where(NamedTuple):
    """A place in a table."""

    rank: int
    position: int


Key = tuple[Kind, int, int | None]  # kind, stage, microbatch


class Crossing(NamedTuple):
    """A tensor that goes from one rank to another: the producing and the consuming action, and its two transfers."""

    producer: Key
    consumer: Key
    send: Key
    receive: Key
    boundary: int  # the stage in front of the boundary that is crossed


def places(schedule: Schedule) -> dict[Key, Where]:
    """Where each action stands (parts of an overlapped pair stand in the same place)."""
    return {
        (part.kind, part.stage, part.microbatch): Where(rank, position)
        for rank in range(len(schedule.ranks))
        for position, part in schedule.parts(rank)
    }


def crossings(schedule: Schedule) -> Iterator[Crossing]:
    """Every tensor that must travel: outputs forward and input gradients back, where neighbours are on two ranks."""
    home = schedule.placement
    for s in range(schedule.stages - 1):
        if home[s] == home[s + 1]:
            continue
        for m in range(schedule.microbatches):
            yield Crossing((Kind.F, s, m), (Kind.F, s + 1, m), (Kind.SEND_F, s, m), (Kind.RECV_F, s + 1, m), s)
            yield Crossing((Kind.B, s + 1, m), (Kind.B, s, m), (Kind.SEND_B, s + 1, m), (Kind.RECV_B, s, m), s)


def durations(schedule: Schedule, costs: Costs, where: dict[Key, Where]) -> list[list[float]]:
    """Time of every action, laid out as the table; what does not compute takes none here."""
    forward, backward, weight = (costs.per_stage(f, schedule.stages) for f in ("forward", "backward", "weight"))

    def time(part: Action) -> float:
        s = part.stage
        if part.kind is Kind.F:
            return forward[s]
        if part.kind is Kind.B:
            return backward[s] - weight[s] if (Kind.W, s, part.microbatch) in where else backward[s]
        return weight[s] if part.kind is Kind.W else 0

    return [[time(a) if a.also is None else sum(map(time, a.parts)) for a in row] for row in schedule.ranks]


class Waits:
    """A graph of things that take time and wait for each other; nodes are numbers, given out by `node`."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.followers: list[list[int]] = []
        self.open: list[int] = []  # how many a node still waits for

    def node(self, cost: float) -> int:
        """A new node that takes `cost`."""
        self.cost.append(cost)
        self.followers.append([])
        self.open.append(0)
        return len(self.cost) - 1

    def wait(self, node: int, first: int) -> None:
        """`node` starts only after `first` has ended."""
        self.followers[first].append(node)
        self.open[node] += 1

    def ends(self) -> list[float]:
        """Earliest end of every node; uses the graph up. Nodes that wait for themselves have no end: see `circle`."""
        end = list(self.cost)
        ready = [node for node, count in enumerate(self.open) if not count]
        for node in ready:  # grows while it is read
            now = end[node]
            for follower in self.followers[node]:
                end[follower] = max(end[follower], now + self.cost[follower])
                self.open[follower] -= 1
                if not self.open[follower]:
                    ready.append(follower)
        return end

    def circle(self) -> list[int]:
        """After `ends`: nodes of which each waits for the next and the last for the first; empty if all have ended."""
        blocker = {f: n for n, count in enumerate(self.open) if count for f in self.followers[n]}
        node = next((n for n, count in enumerate(self.open) if count), None)
        seen: list[int] = []
        while node is not None and node not in seen:
            seen.append(node)
            node = blocker[node]
        return [] if node is None else seen[seen.index(node) :]
