"""The schedules: pure functions from sizes to a table of compute actions.

PURE. Each function says only in which order a rank computes; `passes.py` adds what follows from that. Letters:
p ranks, m microbatches, v stages (model chunks) per rank. Sources: GPipe (Huang et al. 2018), 1F1B (Narayanan et al.
2019 and 2021, section 2.2), interleaved 1F1B (Narayanan et al. 2021, section 2.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule

Work = Sequence[tuple[int, int]]  # (stage, microbatch), in the order of computing


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards. Keeps m activations; bubble (p-1)/m."""
    work = [[(rank, i) for i in range(m)] for rank in range(p)]
    ranks = tuple(_alternate(row, row, ahead=m) for row in work)
    return Schedule("gpipe", ranks, tuple(range(p)), m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r runs p-r-1 forwards ahead, then one forward, one backward. Keeps p-r activations; bubble (p-1)/m."""
    work = [[(rank, i) for i in range(m)] for rank in range(p)]
    ranks = tuple(_alternate(row, row, ahead=p - rank - 1) for rank, row in enumerate(work))
    return Schedule("1f1b", ranks, tuple(range(p)), m)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B over v chunks per rank, chunk c of rank r being stage c*p+r, in groups of p microbatches per chunk.

    Bubble (p-1)/(v*m) where m is a multiple of p. Any other m is scheduled as the next multiple, and the microbatches
    that do not exist are struck out: striking out cannot make two ranks wait for each other, a shorter last group can.
    """
    padded = -(-m // p) * p
    order = [(chunk, first + i) for first in range(0, padded, p) for chunk in range(v) for i in range(p)]
    ranks = []
    for rank in range(p):
        forward = [(chunk * p + rank, i) for chunk, i in order]
        backward = [((v - 1 - chunk) * p + rank, i) for chunk, i in order]
        row = _alternate(forward, backward, ahead=2 * (p - rank - 1) + (v - 1) * p)
        ranks.append(tuple(action for action in row if action.microbatch is not None and action.microbatch < m))
    return Schedule("interleaved", tuple(ranks), tuple(range(p)) * v, m)


def single(m: int, v: int = 1) -> Schedule:
    """One rank: each microbatch forward through its v stages and back. What training without a pipeline runs."""
    row: list[Action] = []
    for i in range(m):
        row += [Action(Kind.F, stage, i) for stage in range(v)]
        row += [Action(Kind.B, stage, i) for stage in reversed(range(v))]
    return Schedule("single", (tuple(row),), (0,) * v, m)


def _alternate(forward: Work, backward: Work, ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards (or all), then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forward))
    row = [Action(Kind.F, *work) for work in forward[:ahead]]
    for after, before in zip(forward[ahead:], backward, strict=False):
        row += [Action(Kind.F, *after), Action(Kind.B, *before)]
    row += [Action(Kind.B, *work) for work in backward[len(forward) - ahead :]]
    return tuple(row)


# name -> (function of p, m, v; whether it takes several chunks per rank)
SCHEDULES: dict[str, tuple[Callable[[int, int, int], Schedule], bool]] = {
    "gpipe": (lambda p, m, v: gpipe(p, m), False),
    "1f1b": (lambda p, m, v: one_f_one_b(p, m), False),
    "interleaved": (interleaved, True),
}


def build(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The table of `name`, compute actions only; one rank always gets `single`. Refuses what does not fit together."""
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1) or ["1f1b"]
        raise refuse(f"--schedule {name}", f"the schedules are {', '.join(SCHEDULES)}", f"--schedule {near[0]}")
    for option, size in (("--pp", p), ("microbatches", m), ("--vpp", v)):
        if size < 1:
            raise refuse(f"{option} {size}", "a schedule needs at least one of them", f"{option} 1")
    if p == 1:
        return single(m, v)
    make, chunked = SCHEDULES[name]
    asked = f"--schedule {name} --pp {p} --vpp {v}"
    if chunked and v == 1:
        raise refuse(
            asked, f"{name} needs at least 2 stages per rank", f"--schedule {name} --vpp 2, or --schedule 1f1b"
        )
    if not chunked and v > 1:
        raise refuse(asked, f"{name} has one stage per rank", f"--schedule interleaved --vpp {v}, or --vpp 1")
    return make(p, m, v)
