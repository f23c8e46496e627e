"""Attention as a list of tiles: which blocks of queries and keys meet, and what is allowed inside a block. PURE.

A query at row slot i may attend to a key at slot j of its own document: with j <= i, and j > i - window where there is
a window; or, not causal, to all of it. Only blocks with an allowed pair become tiles, so work is proportional to what
the mask allows, and the mask itself exists at most for one tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import groupby

from isotron.core.rows import Cuts, Runs

Span = tuple[int, int]


class Kind(Enum):
    """What is allowed in a tile: every pair, key index <= query index of a square, or what the row slots say."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"


@dataclass(frozen=True)
class Tile:
    """Rows [start, stop) of a batch, local queries and keys [start, stop), the row slots of the first ones.

    `first`: no earlier tile of the list has these queries.
    """

    rows: Span
    q: Span
    k: Span
    q_at: int
    k_at: int
    kind: Kind
    window: int = 0
    first: bool = True

    @property
    def shape(self) -> Span:
        """Queries and keys."""
        return self.q[1] - self.q[0], self.k[1] - self.k[0]


@dataclass(frozen=True)
class _Segment:
    """Tokens of one run and one document: slots [row, stop), the first one at local index `local`."""

    local: int
    row: int
    stop: int


@lru_cache(maxsize=256)
def tiles(
    queries: Runs,
    keys: Runs,
    cuts: Cuts | None,
    batch: int,
    window: int = 0,
    most: int = 0,
    join: bool = True,
    causal: bool = True,
) -> tuple[Tile, ...]:
    """The tiles between the queries and the keys of `batch` rows.

    `cuts`: documents of each row that do not see one another. `most` above 0: queries per tile. `join`: tiles may span
    several runs, whose slots do not follow one another. Without `causal` there is no window.
    """
    found: list[Tile] = []
    for span, borders in _alike(cuts, batch):
        here: list[Tile] = []
        for start, stop in borders:
            q, k = _inside(queries, start, stop), _inside(keys, start, stop)
            if causal and join and not window and not most and q == k and _adjacent(q):
                here.append(_square(span, q))
                continue
            for a in q:
                for b in k:
                    here += _between(span, a, b, window, most) if causal else _everything(span, a, b, most)
        found += _joined(here) if join else here
    return tuple(_firsts(found))


def _alike(cuts: Cuts | None, batch: int) -> Iterator[tuple[Span, list[Span]]]:
    """Spans of neighbouring rows with the same documents, and those documents."""
    if cuts is None:
        yield (0, batch), [(0, 1 << 62)]
        return
    start = 0
    for borders, group in groupby(cuts):
        stop = start + len(list(group))
        yield (start, stop), list(zip(borders, borders[1:], strict=False))
        start = stop


def _inside(runs: Runs, start: int, stop: int) -> list[_Segment]:
    found = []
    for r in runs:
        low, high = max(start, r.row), min(stop, r.row + r.length)
        if low < high:
            found.append(_Segment(r.local + low - r.row, low, high))
    return found


def _adjacent(segments: list[_Segment]) -> bool:
    """Whether segments follow one another here, in the order of the row."""
    pairs = zip(segments, segments[1:], strict=False)
    return bool(segments) and all(b.local == a.local + a.stop - a.row and b.row >= a.stop for a, b in pairs)


def _square(rows: Span, segments: list[_Segment]) -> Tile:
    span = (segments[0].local, segments[-1].local + segments[-1].stop - segments[-1].row)
    return Tile(rows, span, span, segments[0].row, segments[0].row, Kind.CAUSAL)


def _between(rows: Span, q: _Segment, k: _Segment, window: int, most: int) -> Iterator[Tile]:
    """Tiles of one segment of queries and one of keys; every query of a tile sees at least one key of it."""
    start, stop = max(q.row, k.row), q.stop
    if window:
        stop = min(stop, k.stop + window - 1)
    step = min((n for n in (_step(window), most) if n), default=stop - start)
    for low in range(start, stop, max(step, 1)):
        high = min(low + step, stop)
        first = max(k.row, low - window + 1) if window else k.row
        last = min(k.stop, high)
        bound = last - 1 > low or (window > 0 and first <= high - 1 - window)
        square = (low, high) == (first, last) and not (window and high - low > window)
        kind = Kind.CAUSAL if square and bound else Kind.BAND if bound else Kind.FULL
        at = (q.local + low - q.row, q.local + high - q.row)
        over = (k.local + first - k.row, k.local + last - k.row)
        yield Tile(rows, at, over, low, first, kind, window if kind is Kind.BAND else 0)


def _everything(rows: Span, q: _Segment, k: _Segment, most: int) -> Iterator[Tile]:
    """Tiles in which every query sees every key."""
    over = (k.local, k.local + k.stop - k.row)
    for low in range(q.row, q.stop, most or q.stop - q.row):
        high = min(low + (most or q.stop - q.row), q.stop)
        at = (q.local + low - q.row, q.local + high - q.row)
        yield Tile(rows, at, over, low, k.row, Kind.FULL)


def _step(window: int) -> int:
    """Queries per tile under a window: wide enough for good matrix products, narrow enough to waste few of them."""
    return min(max(window, 64), 512) if window else 0


def _joined(found: list[Tile]) -> list[Tile]:
    """Neighbouring full tiles as one."""
    out: list[Tile] = []
    for tile in found:
        if out and out[-1].kind is tile.kind is Kind.FULL and out[-1].rows == tile.rows:
            last = out[-1]
            if last.q == tile.q and last.k[1] == tile.k[0]:
                out[-1] = replace(last, k=(last.k[0], tile.k[1]))
                continue
            if last.k == tile.k and last.q[1] == tile.q[0]:
                out[-1] = replace(last, q=(last.q[0], tile.q[1]))
                continue
        out.append(tile)
    return out


def _firsts(found: list[Tile]) -> Iterator[Tile]:
    seen: dict[Span, list[Span]] = {}
    for tile in found:
        before = seen.setdefault(tile.rows, [])
        yield replace(tile, first=not any(a < tile.q[1] and tile.q[0] < b for a, b in before))
        before.append(tile.q)
