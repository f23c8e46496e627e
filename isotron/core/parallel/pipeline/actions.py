"""What a pipeline rank can do, as data: one `Action` is one thing, a `Schedule` is a table of them, a row per rank.

PURE. Notable: tables are plain frozen values. They are built by `schedules.py`, completed by `passes.py`, proved by
`simulate.py`, drawn by `draw.py` and executed by the runtime, and they have a text form that reads back:

    # 1f1b microbatches=2 placement=0,1
    0: F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1 REDUCE0
    1: RECV_F1.0 F1.0 RECV_F1.1 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1 REDUCE1
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from isotron.core.errors import refuse


class Kind(str, Enum):
    """What an action does. A string, so that hashing and printing are those of its name."""

    F = "F"  # forward of a stage
    B = "B"  # backward: the input gradient, and the weight gradient too unless the table has a W for it
    W = "W"  # the weight gradient, deferred
    SEND_F = "SEND_F"  # the output of the stage, to the rank of the next stage
    RECV_F = "RECV_F"  # post the receive of the input of the stage
    SEND_B = "SEND_B"  # the input gradient of the stage, to the rank of the previous stage
    RECV_B = "RECV_B"  # post the receive of the output gradient of the stage
    UNSHARD = "UNSHARD"  # gather the stage's weights over the data-parallel ranks
    RESHARD = "RESHARD"  # drop the gathered weights again
    REDUCE = "REDUCE"  # start the data-parallel reduction of the stage's gradients

    __str__ = str.__str__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W})
TRANSFER = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})

_ACTION = re.compile(r"([A-Z]+(?:_[FB])?)(\d+)(?:\.(\d+))?")
_HEADER = re.compile(r"# (\S+) microbatches=(\d+) placement=(\d+(?:,\d+)*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does for one stage and, unless it concerns weights only, one microbatch.

    `also` is a second compute action that runs overlapped with this one (a forward beside a backward).
    Text: `F0.3`, `SEND_F1.2`, `REDUCE2`, `F0.3&B1.2`.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    also: Action | None = None

    @property
    def computes(self) -> bool:
        """Whether this is F, B or W."""
        return self.kind in COMPUTE

    @property
    def transfers(self) -> bool:
        """Whether this is a SEND or a RECV."""
        return self.kind in TRANSFER

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself and, if there is one, what overlaps it."""
        return (self,) if self.also is None else (self, *self.also.parts)

    def __str__(self) -> str:
        number = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind}{self.stage}{number}" + ("" if self.also is None else f"&{self.also}")

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`; refuses anything else."""
        first, _, rest = text.partition("&")
        match = _ACTION.fullmatch(first)
        if not match or match[1] not in Kind.__members__:
            raise refuse(
                f"action {text!r}", "this is not KIND STAGE.MICROBATCH", "F0.3, SEND_F1.2, REDUCE2 or F0.3&B1.2"
            )
        kind = Kind[match[1]]
        if (match[3] is None) == (kind in COMPUTE or kind in TRANSFER):
            rule = "names a microbatch" if match[3] is None else "concerns a whole stage, not one microbatch"
            raise refuse(f"action {text!r}", f"{kind} {rule}", f"{kind}{match[2]}" + (".0" if match[3] is None else ""))
        number = None if match[3] is None else int(match[3])
        return Action(kind, int(match[2]), number, Action.parse(rest) if rest else None)


@dataclass(frozen=True)
class Schedule:
    """A table: what every rank does, in order. `placement[stage]` is the rank that holds the stage."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def parts(self, rank: int) -> Iterator[tuple[int, Action]]:
        """Every action of `rank`, overlapped ones one by one, with its position in the row."""
        for position, action in enumerate(self.ranks[rank]):
            yield position, action
            if action.also is not None:
                for part in action.also.parts:
                    yield position, part

    def to_text(self) -> str:
        """A header and one line per rank; `from_text` reads it back."""
        placement = ",".join(map(str, self.placement))
        lines = [f"# {self.name} microbatches={self.microbatches} placement={placement}"]
        lines += [f"{rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.ranks)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Schedule:
        """The table that `to_text` wrote; refuses a wrong header, rank number or action by its line."""
        lines = [line for line in text.splitlines() if line.strip()]
        header = _HEADER.fullmatch(lines[0].strip()) if lines else None
        if not header:
            found = repr(lines[0]) if lines else "an empty text"
            raise refuse("a pipeline table", f"it begins with {found}", "# NAME microbatches=2 placement=0,1")
        ranks = []
        for rank, line in enumerate(lines[1:]):
            number, colon, actions = line.partition(":")
            if not colon or number.strip() != str(rank):
                raise refuse(
                    f"line {line[:40]!r} of a pipeline table", f"this is the line of rank {rank}", f"{rank}: F0.0"
                )
            ranks.append(tuple(Action.parse(word) for word in actions.split()))
        return Schedule(header[1], tuple(ranks), tuple(map(int, header[3].split(","))), int(header[2]))
