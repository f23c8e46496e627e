"""How a stage's parameters are put in order, cut into buckets, and each bucket into runs. PURE: shapes only.

`data.py` cuts real buffers by this file, the planner counts bytes by it: there is one answer to what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from isotron.core.layout import Box, Placed, cut

IsPartial = Callable[[Placed, int], bool]


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a stage's flat buffer and their parameters; `cuts` are the ends of the ranks' runs."""

    start: int
    stop: int
    cuts: tuple[int, ...]
    late: bool
    names: tuple[str, ...]


def partial_pieces(placed: Mapping[str, Placed], is_partial: IsPartial) -> list[tuple[str, Box, int]]:
    """(name, local box, replicas) of the pieces whose gradient each replica holds only a part of."""
    found = []
    for name, p in placed.items():
        for piece, (_, count) in zip(p.shard.pieces, p.shard.replicas, strict=True):
            if count > 1 and is_partial(p, count):
                found.append((name, piece.local_box, count))
    return found


def partial_rule(sequence_parallel: bool) -> IsPartial:
    """Whether the replicas of a piece each saw a part of the activation: of its heads, or of its sequence."""
    return lambda p, replicas: p.rule.region == "heads" or sequence_parallel


def lateness(partial: Sequence[tuple[str, Box, int]], tie: str | None) -> dict[str, int]:
    """Name -> 1 or 2 for what is reduced after the table. A tied parameter sits alone: its two owners must cut it
    alike, or rounding could drive their copies apart.
    """
    return {name: 1 for name, _, _ in partial} | ({tie: 2} if tie else {})


def cut_buckets(
    shapes: Mapping[str, tuple[int, ...]], late: Mapping[str, int], bucket_size: int, ways: int
) -> list[Span]:
    """Buckets of about `bucket_size` elements over parameters in buffer order, each cut at rows into `ways` runs."""
    groups: list[list[str]] = []
    for name, shape in shapes.items():
        full = groups and sum(prod(shapes[n]) for n in groups[-1]) + prod(shape) > bucket_size
        if not groups or full or late.get(groups[-1][-1]) != late.get(name):
            groups.append([])
        groups[-1].append(name)
    spans, start = [], 0
    for group in groups:
        runs = cut([(shapes[n][0], prod(shapes[n][1:])) for n in group], ways)
        spans.append(Span(start, start + runs[-1], tuple(start + c for c in runs), group[0] in late, tuple(group)))
        start += runs[-1]
    return spans
