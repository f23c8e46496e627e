"""The schedules whose stages come back up the ranks like a V: rank r holds stage r and stage 2p-1-r.

PURE. Notable: a rank's two stages balance each other (one keeps activations long where the other keeps them briefly),
and the loss stands on the first rank, whose backward can begin early. Half a rank's layers are one stage, so
activations below are counted in half microbatches. Sources: ZB-V (Qi et al. 2023, section 6), V-Half and V-Min (Qi et
al. 2024, section 3), DualPipeV (the V-shaped half of DualPipe, DeepSeek-AI 2024, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.weights import place_weights

PERIOD = 6  # time units of one microbatch on one rank: two stages of F, B and W
# time units per rank on the way down and up in the forward, then down and up in the backward
HALF, MIN = (2, 1, 2, 1), (1, 1, 1, 1)


def vee(p: int) -> tuple[int, ...]:
    """The placement of a V over p ranks."""
    return (*range(p), *reversed(range(p)))


def zbv(p: int, m: int) -> Schedule:
    """No idle time between a rank's first and last action for F=B=W and m >= 2p, with the activations of 1F1B (2p)."""

    def words(r: int, n: int) -> Iterable[str]:
        yield from ("a",) * (2 * (p - r - 1)) + ("ab",) * (r + 1) + ("Bb",) * (p - r - 1)
        yield from ("BaAb",) * (n - 2 * p + r + 1) + ("BAb",) * (p - r - 1) + ("BA",) * (r + 1) + ("A",) * (p - r - 1)

    n = max(m, 2 * p)
    bare = Schedule("zbv", tuple(_spelled(p, r, m, words(r, n)) for r in range(p)), vee(p), m)
    return place_weights(bare, 2 * p)


def v_half(p: int, m: int) -> Schedule:
    """Half the activations of 1F1B (p+2 halves) at no more than half its bubble, for F=B=W."""
    return place_weights(_repeated("v-half", p, m, HALF), p + 2)


def v_min(p: int, m: int) -> Schedule:
    """A third of the activations of 1F1B (2p/3 + 2 halves) at about two thirds of its bubble, for F=B=W."""
    return place_weights(_repeated("v-min", p, m, MIN), -(-2 * p // 3) + 2)


def dualpipe_v(p: int, m: int) -> Schedule:
    """Forwards and backwards run as overlapped pairs; weight gradients are deferred only where a rank would wait.

    Bubble (p-1)(F&B + B - 3W) for m >= 2p, B being the whole backward; keeps 2p+1 halves.
    """
    return Schedule("dualpipev", tuple(_dual_row(p, r, m) for r in range(p)), vee(p), m)


def _dual_row(p: int, r: int, m: int) -> tuple[Action, ...]:
    """Row r of DualPipeV in eight phases, as for at least 2p microbatches; those that do not exist are left out."""
    n, down, up = max(m, 2 * p), r, 2 * p - 1 - r
    count = dict.fromkeys(product((Kind.F, Kind.B), (down, up)), 0)
    row: list[Action | None] = []
    owed: list[Action] = []

    def act(kind: Kind, stage: int, beside: Action | None = None, split: bool = False) -> Action | None:
        i = count[kind, stage]
        count[kind, stage] += 1
        if split and i < m:
            owed.append(Action(Kind.W, stage, i))
        return Action(kind, stage, i, beside) if i < m else beside

    def both(forward: int, backward: int) -> Action | None:
        return act(Kind.F, forward, act(Kind.B, backward))

    row += [act(Kind.F, down) for _ in range(2 * (p - r - 1))]
    row += [act(Kind.F, stage) for _ in range(r + 1) for stage in (down, up)]
    for _ in range(p - r - 1):
        row += [act(Kind.B, up, split=True), owed.pop(0) if owed else None, act(Kind.F, up)]
    row += [pair for _ in range(n - 2 * p + r + 1) for pair in (both(down, up), both(up, down))]
    row += [action for _ in range(p - r - 1) for action in (act(Kind.B, up), both(up, down))]
    row += [act(Kind.B, (up, down)[i % 2], split=i > r) for i in range(2 * (r + 1))]
    for _ in range(p - r - 1):
        row += [owed.pop(0) if owed else None, act(Kind.B, down, split=True)]
    return tuple(action for action in (*row, *owed) if action is not None)


def _spelled(p: int, r: int, m: int, words: Iterable[str]) -> tuple[Action, ...]:
    """A row from words: a, b the forwards of a rank's first and second stage, A, B their backwards; in order of m."""
    count = dict.fromkeys("abAB", 0)
    row = []
    for letter in "".join(words):
        stage = r if letter in "aA" else 2 * p - 1 - r
        if count[letter] < m:  # a schedule for more microbatches, without those that do not exist
            row.append(Action(Kind.F if letter in "ab" else Kind.B, stage, count[letter]))
        count[letter] += 1
    return tuple(row)


def _repeated(name: str, p: int, m: int, steps: Sequence[int]) -> Schedule:
    """The order in which one microbatch's pattern, repeated every `PERIOD` units of time, asks for what a rank does.

    Of all lengths of the three turns of the V the shortest are taken with which no two repeats meet on a rank.
    """

    def times(r: int, turns: Sequence[int]) -> tuple[int, ...]:
        down, up, back, home = steps
        last = p - 1
        end = down * last + turns[0] + up * last + turns[1]
        turn = end + back * last + turns[2]
        return down * r, down * last + turns[0] + up * (last - r), end + back * r, turn + home * (last - r)

    def free(turns: Sequence[int]) -> bool:
        return all(len({t % PERIOD for t in times(r, turns)}) == 4 for r in range(p))

    turns = min(filter(free, product(range(1, PERIOD + 1), repeat=3)), key=lambda t: (sum(t), t))
    rows = []
    for r in range(p):
        stages = (Kind.F, r), (Kind.F, 2 * p - 1 - r), (Kind.B, 2 * p - 1 - r), (Kind.B, r)
        cells = sorted((t + PERIOD * i, i, w) for t, w in zip(times(r, turns), stages, strict=True) for i in range(m))
        rows.append(tuple(Action(kind, stage, i) for _, i, (kind, stage) in cells))
    return Schedule(name, tuple(rows), vee(p), m)
