"""What a step of many ranks takes with a core for each, found on a machine with fewer.

Every rank notes the CPU-seconds that it has used when it sends, gathers and waits. Afterwards these notes are played
again with a clock per rank: between two notes it runs by the CPU time used, and what is waited for is there as soon as
its senders have got to it. So waiting counts and sharing a core does not; messages cost what the processors do for them
and no time on the way. With as many cores as ranks it is the time of the step itself.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotron.core import comm
from isotron.core.mesh import Group

COLLECTIVES = ("start_all_gather", "start_reduce_scatter", "start_all_reduce", "start_reduce_flat", "start_gather_flat",
               "start_all_to_all")  # fmt: skip


@dataclass(frozen=True)
class Note:
    """`kind`: send, meet (post of a collective), wait, end. `keys`: what is sent or waited for. `at`: CPU-seconds."""

    kind: str
    keys: tuple[Any, ...]
    at: float


@dataclass
class Notes:
    """What one rank notes; from its making on the communications of this process are watched."""

    held: list[Note] = field(default_factory=list)
    counts: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    started: float = 0.0

    def __post_init__(self) -> None:
        comm.exchange = self._watched_exchange(comm.exchange)
        for name in COLLECTIVES:
            setattr(comm, name, self._watched_collective(getattr(comm, name)))

    def begin(self) -> None:
        """A step begins."""
        self.held.clear()
        self.counts.clear()
        self.started = time.process_time()

    def end(self) -> list[Note]:
        """The step's notes."""
        self._note("end", ())
        return list(self.held)

    def _note(self, kind: str, keys: tuple[Any, ...]) -> None:
        self.held.append(Note(kind, keys, time.process_time() - self.started))

    def _next(self, key: Any) -> tuple[Any, int]:
        self.counts[key] += 1
        return key, self.counts[key]

    def _watched_exchange(self, plain: Callable[..., list[comm.Pending]]) -> Callable[..., list[comm.Pending]]:
        def exchange(sends: Sequence[Any], receives: Sequence[Any], group: Group) -> list[comm.Pending]:
            found, me = plain(sends, receives, group), group.ranks[group.index]
            self._note("send", tuple(self._next((me, to)) for _, to in sends))
            for (_, of), pending in zip(receives, found[len(sends) :], strict=True):
                self._watch(pending, self._next((of, me)))
            return found

        return exchange

    def _watched_collective(self, plain: Callable[..., comm.Pending]) -> Callable[..., comm.Pending]:
        def start(*args: Any, **named: Any) -> comm.Pending:
            pending = plain(*args, **named)
            group = next(x for x in (*args, *named.values()) if isinstance(x, Group))
            if group.size > 1:
                number = self._next(tuple(group.ranks))[1]
                each = tuple(((tuple(group.ranks), member), number) for member in group.ranks)
                self._note("send", (each[group.index],))
                self._watch(pending, *each)
            return pending

        return start

    def _watch(self, pending: comm.Pending, *keys: Any) -> None:
        plain = pending.wait

        def wait() -> Any:
            self._note("begins to wait", ())
            found = plain()
            self._note("wait", keys)
            return found

        pending.wait = wait  # type: ignore[method-assign]


def played(every: Sequence[Sequence[Note]]) -> list[float]:
    """Seconds after which each rank is through its notes."""
    clocks, places, sent = [0.0] * len(every), [0] * len(every), dict[Any, float]()
    while any(place < len(notes) for place, notes in zip(places, every, strict=True)):
        before = list(places)
        for rank, notes in enumerate(every):
            while places[rank] < len(notes):
                note, last = notes[places[rank]], notes[places[rank] - 1].at if places[rank] else 0.0
                if note.kind == "wait":
                    if any(key not in sent for key in note.keys):
                        break
                    clocks[rank] = max(clocks[rank], *(sent[key] for key in note.keys))
                clocks[rank] += note.at - last
                if note.kind == "send":
                    sent |= dict.fromkeys(note.keys, clocks[rank])
                places[rank] += 1
        if places == before:
            raise RuntimeError("a rank waits for what nobody sends")
    return clocks
