"""The schedules in which every stage passes its output down the ranks: pure functions from sizes to a table.

PURE. Each function says only in which order a rank computes; `passes.py` adds what follows from that, `vshape.py` has
the schedules that come back up the ranks, `registry.py` the list of all. Letters: p ranks, m microbatches, v stages
(model chunks) per rank. Sources: GPipe (Huang et al. 2018), 1F1B (Narayanan et al. 2019 and 2021, section 2.2),
interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), breadth-first (Lamy-Poirier 2022), zero-bubble (Qi et al.
2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.merge import merged

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


def interleaved(p: int, m: int, v: int, group: int = 0) -> Schedule:
    """1F1B over v chunks per rank, chunk c of rank r being stage c*p+r, in groups of microbatches per chunk.

    `group` is p unless given. A larger one gives transfers more time and keeps more activations; a smaller one keeps
    fewer, and ranks wait where the first microbatch of a group is not back yet. Bubble (p-1)/(v*m) where m is a
    multiple of a group >= p. Any other m is then scheduled as the next multiple, and the microbatches that do not
    exist are struck out: striking out cannot make two ranks wait for each other, a shorter last group can.
    """
    group = group or p
    padded = -(-m // group) * group if group >= p else m
    order = [(c, i) for first in range(0, padded, group) for c in range(v) for i in range(first, first + group)]
    order = [(chunk, i) for chunk, i in order if i < padded]
    forward = [[(chunk * p + rank, i) for chunk, i in order] for rank in range(p)]
    backward = [[((v - 1 - chunk) * p + rank, i) for chunk, i in order] for rank in range(p)]
    ahead = [2 * (p - rank - 1) + (v - 1) * group for rank in range(p)]
    if group < p:
        limits = [n + 1 for n in ahead]
        return merged("interleaved", _named(Kind.F, forward), _named(Kind.B, backward), limits, tuple(range(p)) * v)
    ranks = (_alternate(*row) for row in zip(forward, backward, ahead, strict=True))
    kept = tuple(tuple(action for action in row if int(action.microbatch or 0) < m) for row in ranks)
    return Schedule("interleaved", kept, tuple(range(p)) * v, m)


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """All microbatches through a chunk before the next chunk; all forwards, then all backwards.

    Bubble (p-1)/(v*m) for m >= p; keeps v*m activations, and touches each chunk's weights in one run per direction.
    """
    ranks = []
    for rank in range(p):
        forward = [(chunk * p + rank, i) for chunk in range(v) for i in range(m)]
        backward = [(chunk * p + rank, i) for chunk in reversed(range(v)) for i in range(m)]
        ranks.append(_alternate(forward, backward, ahead=v * m))
    return Schedule("breadth-first", tuple(ranks), tuple(range(p)) * v, m)


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with deferred weight gradients: rank r puts off r of them, so that every rank keeps p activations.

    Bubble (p-1)(F+B-W) where the input gradient costs B >= W and m >= p.
    """
    ranks = tuple(_deferred(rank, m, ahead=p - rank - 1, lag=rank) for rank in range(p))
    return Schedule("zb-h1", ranks, tuple(range(p)), m)


def zb_h2(p: int, m: int) -> Schedule:
    """Twice as many forwards ahead and twice as many weight gradients put off: every rank keeps 2p-1 activations.

    Idle between a rank's first and last action: (p-1)(F+B-2W), none for F=B=W; where B >= W and m >= 2p-1.
    """
    ranks = tuple(_deferred(rank, m, ahead=2 * (p - rank - 1), lag=2 * rank) for rank in range(p))
    return Schedule("zb-h2", ranks, tuple(range(p)), m)


def single(m: int, v: int = 1) -> Schedule:
    """One rank: each microbatch forward through its v stages and back. What training without a pipeline runs."""
    row: list[Action] = []
    for i in range(m):
        row += [Action(Kind.F, stage, i) for stage in range(v)]
        row += [Action(Kind.B, stage, i) for stage in reversed(range(v))]
    return Schedule("single", (tuple(row),), (0,) * v, m)


def _named(kind: Kind, rows: Sequence[Work]) -> list[list[Action]]:
    """The work of every rank as actions."""
    return [[Action(kind, *work) for work in row] for row in rows]


def _alternate(forward: Work, backward: Work, ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards (or all), then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forward))
    row = [Action(Kind.F, *work) for work in forward[:ahead]]
    for after, before in zip(forward[ahead:], backward, strict=False):
        row += [Action(Kind.F, *after), Action(Kind.B, *before)]
    row += [Action(Kind.B, *work) for work in backward[len(forward) - ahead :]]
    return tuple(row)


def _deferred(stage: int, m: int, ahead: int, lag: int) -> tuple[Action, ...]:
    """One stage's row: `ahead` forwards, then forward, input gradient and the weight gradient of `lag` ago in turn."""
    row = [Action(Kind.F, stage, i) for i in range(min(ahead, m))]
    for i in range(m + lag):
        row += [Action(Kind.F, stage, i + ahead)] if i + ahead < m else []
        row += [Action(Kind.B, stage, i)] if i < m else []
        row += [Action(Kind.W, stage, i - lag)] if 0 <= i - lag < m else []
    return tuple(row)
