"""Tables in files: the text form of `actions.py`, and CSV with one line per rank. PURE.

CSV cells are actions (`F0.3`, `B1.2`, `SEND_F0.3`) or, as other programs write them, stage, letter and microbatch:
`0F3` forward, `1B2` whole backward, `1I2` input gradient, `1W2` weight gradient. Empty cells are skipped. Which rank
holds a stage follows from the lines; a table without transfers or reductions gets them when it is used.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule

SUFFIXES = (".txt", ".csv")
_FOREIGN = re.compile(r"(\d+)([FBIW])(\d+)")


def is_file(name: str) -> bool:
    """Whether a schedule is asked for by the path of a file."""
    return name.endswith(SUFFIXES)


@lru_cache(maxsize=8)
def read(path: str) -> Schedule:
    """The table in a file; refuses one that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "--schedule 1f1b, or the path of a table"
        raise refuse(f"--schedule {path}", f"it cannot be read: {error}", fix) from None
    return parse(text, Path(path).stem)


def parse(text: str, name: str = "table") -> Schedule:
    """The table that a text holds, in either form."""
    return Schedule.from_text(text) if text.lstrip().startswith("#") else from_csv(text, name)


def fitting(path: str, p: int, m: int, v: int) -> Schedule:
    """The table in a file, which must be for these sizes."""
    table = read(path)
    found = len(table.ranks), table.microbatches, table.stages
    if found != (p, m, p * v):
        case = f"the table has {found[0]} ranks, {found[1]} microbatches and {found[2]} stages"
        asked = f"--schedule {path} --pp {p} --vpp {v} with {m} microbatches"
        fix = f"--pp {found[0]} --vpp {max(1, found[2] // found[0])} and {found[1]} microbatches in every step"
        raise refuse(asked, case, fix)
    return table


def to_csv(schedule: Schedule) -> str:
    """One line per rank, a cell per action; `from_csv` reads it back."""
    return "\n".join(",".join(map(str, row)) for row in schedule.ranks) + "\n"


def from_csv(text: str, name: str = "table") -> Schedule:
    """The table of a CSV text; refuses a stage on two ranks, or one that is missing."""
    rows = [
        tuple(_action(cell.strip()) for cell in line.split(",") if cell.strip())
        for line in text.splitlines()
        if line.strip()
    ]
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in (part for a in row for part in a.parts):
            if home.setdefault(action.stage, rank) != rank:
                case = f"stage {action.stage} is on rank {home[action.stage]} already"
                raise refuse(f"table {name}, rank {rank}, {action}", case, "each stage on one line")
    if not home or sorted(home) != list(range(len(home))):
        case = f"its stages are {sorted(home)}"
        raise refuse(f"table {name}", case, "stages counted from 0 without a gap: F0.0,B0.0")
    numbers = [a.microbatch for row in rows for a in row if a.microbatch is not None]
    return Schedule(name, tuple(rows), tuple(home[s] for s in range(len(home))), max(numbers) + 1)


def _action(cell: str) -> Action:
    match = _FOREIGN.fullmatch(cell)
    if not match:
        return Action.parse(cell)
    kind = {"F": Kind.F, "B": Kind.B, "I": Kind.B, "W": Kind.W}[match[2]]
    return Action(kind, int(match[1]), int(match[3]))
