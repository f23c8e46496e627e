"""Errors that say what to do. Every refusal has three lines: what was asked, what is the case, what to do.

PURE: imports nothing but the standard library.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LISTED = 20  # names, or problems alike, that a message shows of a list


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in three lines.

    `asked` names the options and their values, `case` states the rule that they break, `fix` gives a value that works.
    """

    asked: str
    case: str
    fix: str

    def __str__(self) -> str:
        return f"asked:  {self.asked}\nbut:    {self.case}\ntry:    {self.fix}"


class Refused(Exception):
    """A run that cannot be as asked; carries every problem found, not only the first.

    `exit_code` is what the command line exits with: 2 for a request that can be corrected, 1 for a run that failed.
    """

    def __init__(self, problems: Iterable[Problem], exit_code: int = 2) -> None:
        self.problems = tuple(problems)
        self.exit_code = exit_code
        super().__init__("\n\n".join(str(p) for p in self.problems))

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # several problems must survive the way from a worker process to its parent
        return (Refused, (self.problems, self.exit_code))


def refuse(asked: str, case: str, fix: str, exit_code: int = 2) -> Refused:
    """The common case of one problem: `raise refuse(asked, case, fix)`."""
    return Refused([Problem(asked, case, fix)], exit_code)


def listed(names: Iterable[Any], between: str = ", ") -> str:
    """The names, or the first of them and how many there are: a model has tens of thousands of tensors."""
    found = list(map(str, names))
    shown = between.join(found[:LISTED])
    return shown if len(found) <= LISTED else f"{shown}{between}... ({len(found):,} in all)"


def shortened(problems: list[Problem]) -> list[Problem]:
    """The problems, of tensors or files that have one each; or the first of them and how many there are."""
    if len(problems) <= LISTED:
        return problems
    last = problems[LISTED]
    return [*problems[:LISTED], Problem(last.asked, f"{len(problems) - LISTED:,} more like these", last.fix)]


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def refuse_file(error: OSError) -> Refused | None:
    """What the system says about a file, in three lines; None where the error is about something else."""
    if error.filename is None and error.errno not in _DISK:
        return None
    name = f"the file {error.filename}" if error.filename is not None else "writing a file"
    fix = "a path that exists and may be read or written, on a disk with room; what was complete before still is"
    return refuse(name, f"the system says: {error.strerror}", fix, exit_code=1)
