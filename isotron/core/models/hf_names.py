"""Names of tensors in a Hugging Face directory, as data. PURE.

A tensor of ours is rows of one or several of theirs, one run after another: q|k|v is three runs, a projection that they
interleave head by head is three runs per head. The same table serves both ways.

NAME[i] is entry i of their tensor NAME along its first dimension: to a table a tensor like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """`count` rows of their tensor `theirs`, from row `first` on, every `step`-th."""

    theirs: str
    first: int
    count: int
    step: int = 1

    def rows(self, start: int, count: int) -> slice:
        """Where `count` rows of this run are in their tensor, `start` rows after its first."""
        first = self.first + start * self.step
        return slice(first, first + (count - 1) * self.step + 1, self.step)


@dataclass(frozen=True)
class Mapped:
    """Our tensor `ours` is these runs, one below the other. `transposed`: theirs are stored inputs x outputs."""

    ours: str
    runs: tuple[Run, ...]
    transposed: bool = False

    def theirs(self) -> dict[str, int]:
        """Their tensors, in order of appearance, with the number of rows of each."""
        rows: dict[str, int] = {}
        for run in self.runs:
            rows[run.theirs] = rows.get(run.theirs, 0) + run.count
        return rows


def entry(theirs: str, i: int) -> str:
    """The name of entry `i` of a tensor of theirs."""
    return f"{theirs}[{i}]"


def entry_of(name: str) -> tuple[str, int | None]:
    """(tensor, number) of the name of an entry; a name without a number is a tensor by itself."""
    head, bracket, number = name.removesuffix("]").partition("[")
    return (head, int(number)) if bracket else (name, None)


def same(ours: str, theirs: str, rows: int, transposed: bool = False) -> Mapped:
    """One tensor of ours is one of theirs."""
    return Mapped(ours, (Run(theirs, 0, rows),), transposed)


def stacked(ours: str, theirs: Iterable[tuple[str, int]], transposed: bool = False) -> Mapped:
    """Our tensor is theirs, given as (name, rows), one below the other."""
    return Mapped(ours, tuple(Run(name, 0, rows) for name, rows in theirs), transposed)


def alternating(ours: str, theirs: Iterable[tuple[str, int]], ways: int, transposed: bool = False) -> Mapped:
    """Of each of theirs, given as (name, rows), first every `ways`-th row, then those after them, and so on."""
    runs = (Run(name, odd, rows // ways, ways) for name, rows in theirs for odd in range(ways))
    return Mapped(ours, tuple(runs), transposed)


def interleaved(ours: str, theirs: str, groups: int, sections: Sequence[int]) -> Mapped:
    """Theirs holds the sections (rows each) group by group; ours holds each section of all groups in a row."""
    width, starts = sum(sections), [sum(sections[:i]) for i in range(len(sections))]
    runs = (
        Run(theirs, g * width + start, rows)
        for start, rows in zip(starts, sections, strict=True)
        for g in range(groups)
    )
    return Mapped(ours, tuple(runs))


def with_pairs(ours: str, theirs: str, groups: int, plain: int, turned: int) -> Mapped:
    """Theirs ends each of `groups` groups of rows with `turned` rows as neighbouring pairs; ours has halves there."""
    width, runs = plain + turned, []
    for first in range(0, groups * width, width):
        runs += [Run(theirs, first, plain)] if plain else []
        runs += [Run(theirs, first + plain + odd, turned // 2, 2) for odd in (0, 1)]
    return Mapped(ours, tuple(runs))
