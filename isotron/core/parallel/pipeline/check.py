"""Is this table a training step? Everything about a table that can be seen without running it.

PURE. Each function raises `Refused` with the rank and the action at the first thing that is wrong. That nobody waits
for ever is not seen here but by `simulate.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from isotron.core.errors import Refused, refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.timeline import Crossing, Key, Where, crossings, places


def check(schedule: Schedule) -> dict[Key, Where]:
    """Refuses a table that computes or sends too little, too much or in a wrong order; returns where actions stand."""
    _in_range(schedule)
    where = places(schedule)
    _complete(schedule, where)
    _come_and_go(schedule)
    _sums(schedule)
    for first, then in _precedences(schedule, where):
        if where[first].position >= where[then].position:
            case = f"it does not come after {name(first)}, which it needs"
            raise wrong(schedule, where[then].rank, name(then), case, f"{name(first)} first")
    travels = list(crossings(schedule))
    _sent_and_received(schedule, where, travels)
    _same_order(schedule, where, travels)
    return where


def wrong(schedule: Schedule, rank: int, action: str, case: str, fix: str) -> Refused:
    """The error for one action of a table."""
    return refuse(f"pipeline table {schedule.name}, rank {rank}, {action}", case, fix)


def name(key: Key) -> str:
    """How the action of a key prints."""
    return str(Action(*key))


def _in_range(schedule: Schedule) -> None:
    """Stages stand on their rank, microbatches exist, nothing is there twice."""
    seen: set[Key] = set()
    for rank in range(len(schedule.ranks)):
        for _, part in schedule.parts(rank):
            key = (part.kind, part.stage, part.microbatch)
            if (part.microbatch is None) == (part.computes or part.transfers):
                case = "F, B, W, SEND and RECV are of one microbatch, the others of a stage"
                raise wrong(schedule, rank, str(part), case, f"{part.kind}{part.stage}.0 or REDUCE{part.stage}")
            if not 0 <= part.stage < schedule.stages or schedule.placement[part.stage] != rank:
                case = f"stage {part.stage} is not on this rank, which holds {schedule.stages_of(rank)}"
                raise wrong(schedule, rank, str(part), case, "the rank that the placement gives to the stage")
            if part.microbatch is not None and not 0 <= part.microbatch < schedule.microbatches:
                case = f"there are {schedule.microbatches} microbatches, counted from 0"
                raise wrong(schedule, rank, str(part), case, f"a microbatch below {schedule.microbatches}")
            if key in seen and part.kind not in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE):
                raise wrong(schedule, rank, str(part), "it is there twice", "each action once")
            seen.add(key)


def _complete(schedule: Schedule, where: dict[Key, Where]) -> None:
    """Every (stage, microbatch) has its F and its B."""
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            for key in ((Kind.F, stage, microbatch), (Kind.B, stage, microbatch)):
                if key not in where:
                    raise wrong(schedule, rank, name(key), "it is missing", "one F and one B per stage and microbatch")


def _come_and_go(schedule: Schedule) -> None:
    """Weights are gathered and dropped in turn, and nothing stays."""
    for rank, row in enumerate(schedule.ranks):
        live: set[int] = set()
        for a in row:
            if a.kind is Kind.UNSHARD and a.stage in live:
                raise wrong(schedule, rank, str(a), "the weights are gathered already", "leave it out")
            if a.kind is Kind.RESHARD and a.stage not in live:
                raise wrong(schedule, rank, str(a), "the weights are not gathered", f"UNSHARD{a.stage} first")
            if a.kind in (Kind.UNSHARD, Kind.RESHARD):
                live ^= {a.stage}
        for stage in sorted(live):
            raise wrong(schedule, rank, f"UNSHARD{stage}", "the weights stay after the step", f"RESHARD{stage} at last")


def _sums(schedule: Schedule) -> None:
    """Something has been added since the last REDUCE of a stage."""
    for rank, row in enumerate(schedule.ranks):
        added: set[int] = set()
        for a in row:
            added |= {part.stage for part in a.parts if part.kind in (Kind.B, Kind.W)}
            if a.kind is Kind.REDUCE and a.stage not in added:
                case = "there is no gradient of the stage before it, or none since the last one"
                raise wrong(schedule, rank, str(a), case, "leave it out, or after the last gradient of a microbatch")
            if a.kind is Kind.REDUCE:
                added.discard(a.stage)


def _precedences(schedule: Schedule, where: dict[Key, Where]) -> Iterator[tuple[Key, Key]]:
    """(first, then) of what one rank must do in this order."""
    home = schedule.placement
    for s in range(schedule.stages):
        beside = s > 0 and home[s - 1] == home[s]
        reduce: Key = (Kind.REDUCE, s, None)
        for m in range(schedule.microbatches):
            forward, backward, weight = (Kind.F, s, m), (Kind.B, s, m), (Kind.W, s, m)
            yield forward, backward
            if weight in where:
                yield backward, weight
            if beside:
                yield (Kind.F, s - 1, m), forward
                yield backward, (Kind.B, s - 1, m)
            if reduce in where:
                yield (weight if weight in where else backward), reduce


def _sent_and_received(schedule: Schedule, where: dict[Key, Where], travels: list[Crossing]) -> None:
    """What must travel is sent after it was made and received before it is used; nothing else travels."""
    home = schedule.placement
    for producer, consumer, send, receive, _ in travels:
        for key, rank in ((send, home[producer[1]]), (receive, home[consumer[1]])):
            if key not in where:
                raise wrong(
                    schedule, rank, name(key), f"it is missing: {name(consumer)} needs {name(producer)}", "add it"
                )
        if where[send].position < where[producer].position:
            raise wrong(
                schedule, where[send].rank, name(send), f"it stands before {name(producer)}", "send after making"
            )
        if where[receive].position > where[consumer].position:
            case = f"it stands after {name(consumer)}, which needs it"
            raise wrong(schedule, where[receive].rank, name(receive), case, "receive before using")
    needed = {key for travel in travels for key in (travel.send, travel.receive)}
    for rank, row in enumerate(schedule.ranks):
        for a in row:
            if a.also is not None and not all(part.computes for part in a.parts):
                raise wrong(schedule, rank, str(a), "only compute actions overlap in one action", "one after the other")
            if a.transfers and (a.kind, a.stage, a.microbatch) not in needed:
                raise wrong(schedule, rank, str(a), "its other end is on the same rank or nowhere", "leave it out")


def _same_order(schedule: Schedule, where: dict[Key, Where], travels: list[Crossing]) -> None:
    """From one rank to another, tensors are received in the order in which they are sent: NCCL knows no tags."""
    pairs: dict[tuple[int, int], list[tuple[int, int, Crossing]]] = defaultdict(list)
    for travel in travels:
        sent, received = where[travel.send], where[travel.receive]
        pairs[sent.rank, received.rank].append((sent.position, received.position, travel))
    for (source, target), sent_order in pairs.items():
        sent_order.sort(key=lambda item: item[0])
        for (_, before, first), (_, after, then) in zip(sent_order, sent_order[1:], strict=False):
            if before > after:
                case = f"rank {source} sends {name(then.send)} after {name(first.send)}, here they are received swapped"
                raise wrong(schedule, target, name(then.receive), case, f"{name(first.receive)} first")
