"""Ranks that act together: the little that checkpoints need from a group of processes. PURE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from isotron.core.errors import Problem, Refused, listed, shortened


class Ranks(Protocol):
    """The little that saving needs from a group of processes; every method is called by all of them together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_json(self, obj: Any) -> list[Any] | None:
        """On rank 0 the objects of all ranks in rank order, elsewhere None."""

    def broadcast_json(self, obj: Any) -> Any:
        """The object of rank 0."""

    def barrier(self) -> None:
        """Returns when all ranks have called it."""


@dataclass(frozen=True)
class SingleRank:
    """`Ranks` for a program of one process."""

    rank: int = 0
    size: int = 1

    def gather_json(self, obj: Any) -> list[Any] | None:
        """The one object."""
        return [obj]

    def broadcast_json(self, obj: Any) -> Any:
        """The object itself."""
        return obj

    def barrier(self) -> None:
        """Nobody to wait for."""


R = TypeVar("R")


def _no_share(_: Any) -> None:
    """Nothing for rank 0 to know."""


def together(
    ranks: Ranks, asked: str, work: Callable[[], R], share: Callable[[R], Any] = _no_share
) -> tuple[R, list[Any] | None]:
    """Do `work` on every rank; returns its result here, and on rank 0 `share(result)` (JSON) of all ranks.

    If it fails anywhere it fails everywhere, with the problems of all ranks: no rank is left waiting for another.
    """
    done: list[R] = []
    problems: list[list[str]] = []
    shared: Any = None
    cause: Exception | None = None
    code = 1
    try:
        done = [work()]
        shared = share(done[0])
    except Refused as refusal:
        cause, code = refusal, refusal.exit_code
        problems = [[p.asked, p.case, p.fix] for p in refusal.problems]
    except Exception as error:  # whatever it is, the other ranks must hear of it
        cause = error
        fix = "remove the cause and try again; complete checkpoints stay as they were"
        problems = [[asked, f"{type(error).__name__}: {error}", fix]]
    gathered = ranks.gather_json([shared, problems, code])
    reports = ranks.broadcast_json(None if gathered is None else [report for _, *report in gathered])
    if any(found for found, _ in reports):
        raise _joint(reports) from cause
    return done[0], None if gathered is None else [part for part, _, _ in gathered]


def _joint(reports: list[Any]) -> Refused:
    """One refusal from the [problems, exit code] of all ranks; a problem that only some have names them."""
    having: dict[tuple[str, str, str], list[int]] = {}
    for rank, (problems, _) in enumerate(reports):
        for problem in problems:
            having.setdefault(tuple(problem), []).append(rank)
    found = []
    for (asked, case, fix), which in having.items():
        where = "" if len(which) == len(reports) else f" (rank {listed(which)} of {len(reports)})"
        found.append(Problem(asked, case + where, fix))
    return Refused(shortened(found), max(code for problems, code in reports if problems))
