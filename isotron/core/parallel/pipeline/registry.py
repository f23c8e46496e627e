"""All schedules by name, and what a run asks one for. PURE.

A schedule is asked for by name or by the path of a file that holds a table. What can be said without knowing the number
of microbatches (which stage is on which rank) is in `placement`, because stages are built once and steps may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from isotron.core.errors import Refused, refuse
from isotron.core.parallel.pipeline import schedules, tables, vshape
from isotron.core.parallel.pipeline.actions import Schedule


@dataclass(frozen=True)
class Entry:
    """A schedule: `make(p, m, v, group)`, and how many stages a rank has: "one", "two" (a V) or "several"."""

    make: Callable[[int, int, int, int], Schedule]
    per_rank: str


SCHEDULES: dict[str, Entry] = {
    "gpipe": Entry(lambda p, m, v, g: schedules.gpipe(p, m), "one"),
    "1f1b": Entry(lambda p, m, v, g: schedules.one_f_one_b(p, m), "one"),
    "interleaved": Entry(schedules.interleaved, "several"),
    "breadth-first": Entry(lambda p, m, v, g: schedules.breadth_first(p, m, v), "several"),
    "zb-h1": Entry(lambda p, m, v, g: schedules.zb_h1(p, m), "one"),
    "zb-h2": Entry(lambda p, m, v, g: schedules.zb_h2(p, m), "one"),
    "zbv": Entry(lambda p, m, v, g: vshape.zbv(p, m), "two"),
    "v-half": Entry(lambda p, m, v, g: vshape.v_half(p, m), "two"),
    "v-min": Entry(lambda p, m, v, g: vshape.v_min(p, m), "two"),
    "dualpipev": Entry(lambda p, m, v, g: vshape.dualpipe_v(p, m), "two"),
}
NAMES = ("auto", *SCHEDULES)


def resolved(name: str, v: int) -> str:
    """`auto` without a memory limit: 1f1b, or interleaved where ranks have several stages."""
    return name if name != "auto" else ("interleaved" if v > 1 else "1f1b")


def stages_per_rank(name: str, p: int, v: int) -> int:
    """Stages per rank: 2 for the V-shaped schedules, whether v says so or 1, the default."""
    return 2 if name in SCHEDULES and SCHEDULES[name].per_rank == "two" and v == 1 and p > 1 else v


def placement(name: str, p: int, v: int) -> tuple[int, ...]:
    """Stage -> rank of schedule `name`."""
    if p == 1:
        return (0,) * v
    if tables.is_file(name):
        return tables.read(name).placement
    if name in SCHEDULES and SCHEDULES[name].per_rank == "two":
        return vshape.vee(p)
    return tuple(range(p)) * v


def build(name: str, p: int, m: int, v: int = 1, group: int = 0) -> Schedule:
    """The table of `name`, compute actions only (a file's as it is); one rank always gets `single`.

    Refuses what does not fit together.
    """
    if name not in SCHEDULES and not tables.is_file(name):
        raise unknown(name)
    for option, size in (("--pp", p), ("microbatches", m), ("--vpp", v)):
        if size < 1:
            raise refuse(f"{option} {size}", "a schedule needs at least one of them", f"{option} 1")
    if tables.is_file(name):
        return tables.fitting(name, p, m, v)
    if p == 1:
        return schedules.single(m, v)
    entry = SCHEDULES[name]
    check_stages(name, p, v)
    if group and name != "interleaved":
        case = f"{name} has no groups of microbatches"
        raise refuse(f"--schedule {name} --microbatch-group {group}", case, "--microbatch-group 0")
    return entry.make(p, m, v, group)


def check_stages(name: str, p: int, v: int) -> None:
    """Refuses a number of stages per rank that the schedule does not have."""
    asked, kind = f"--schedule {name} --pp {p} --vpp {v}", SCHEDULES[name].per_rank
    if kind == "several" and v == 1:
        fix = f"--schedule {name} --vpp 2, or --schedule 1f1b"
        raise refuse(asked, f"{name} needs at least 2 stages per rank", fix)
    if kind == "one" and v > 1:
        raise refuse(asked, f"{name} has one stage per rank", f"--schedule interleaved --vpp {v}, or --vpp 1")
    if kind == "two" and v > 2:
        raise refuse(asked, f"{name} has two stages per rank", "--vpp 2, or leave --vpp out")


def unknown(name: str) -> Refused:
    """The error for a schedule that does not exist."""
    near = get_close_matches(name, NAMES, n=1) or ["1f1b"]
    case = f"the schedules are {', '.join(NAMES)}, or the path of a file that holds a table (.txt, .csv)"
    return refuse(f"--schedule {name}", case, f"--schedule {near[0]}")
