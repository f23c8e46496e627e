"""How a stage's parameters are put in order, cut into buckets, and each bucket into runs. PURE: shapes only.

`data.py` cuts real buffers by this file, the planner counts bytes by it: there is one answer to what a rank holds.
Parameters of different classes never share a bucket. A class says whose gradients meet (`group`), so that parameters
with another data-parallel group (experts) need nothing but a class of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from isotron.core.layout import Box, Ints, Placed, cut, rows

IsPartial = Callable[[Placed, int], bool]
DENSE, EXPERTS = "dense", "experts"


def group_of(placed: Placed) -> str:
    """Whose gradients meet: experts live on other ranks than what all tokens pass."""
    return EXPERTS if placed.rule.experts else DENSE


@dataclass(frozen=True)
class Class:
    """What all parameters of a bucket have in common.

    tied: its name where several stages hold it: alone in its bucket, because all holders must cut it alike. unit:
    gathered together (ZeRO-3). early: its gradient is formed in B even where those of matrices wait for W. group: the
    ranks over which gradients are summed.
    """

    frozen: bool = False
    tied: str = ""
    group: str = DENSE
    early: bool = False
    unit: str = ""

    @property
    def order(self) -> tuple[bool, str, str, bool]:
        """Place in the buffer; within a class the last parameters of the stage come first, as in the backward."""
        return self.frozen, self.tied, self.group, self.early


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a stage's flat buffer and their parameters; `cuts` are the ends of the ranks' runs."""

    start: int
    stop: int
    cuts: tuple[int, ...]
    kind: Class
    names: tuple[str, ...]

    @property
    def ways(self) -> int:
        """Ranks that share the bucket."""
        return len(self.cuts) - 1

    def run(self, index: int) -> tuple[int, int]:
        """Elements of the rank `index` among those that share the bucket."""
        return self.cuts[index], self.cuts[index + 1]


def unit_of(name: str) -> str:
    """What is gathered with a parameter: its block (`layers.3`), or its module at the ends of the stage."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else first


@dataclass(frozen=True)
class Classes:
    """The rule that gives a parameter its class.

    ties: names of what several stages hold. by_unit: gathered block by block (ZeRO-3). split_early: tables with W
    actions keep gradients of matrices waiting. group_of: the data-parallel group of a parameter. unit_of: what is
    gathered with a parameter of a local name.
    """

    ties: frozenset[str] = frozenset()
    by_unit: bool = False
    split_early: bool = False
    frozen: tuple[str, ...] = ()
    group_of: Callable[[Placed], str] = group_of
    unit_of: Callable[[str], str] = unit_of

    def of(self, name: str, placed: Placed) -> Class:
        """The class of a parameter under its local name."""
        return Class(
            is_frozen(placed.name, self.frozen),
            placed.name if placed.name in self.ties else "",
            self.group_of(placed),
            self.split_early and len(placed.shard.shape) < 2,
            self.unit_of(name) if self.by_unit else "",
        )


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is not trained: its global name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


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


def cut_buckets(
    shapes: Mapping[str, Ints], classes: Mapping[str, Class], bucket_size: int, ways: Mapping[str, int]
) -> list[Span]:
    """Buckets of about `bucket_size` elements over the parameters of a stage (names in the order of its modules), in
    buffer order; each is cut at rows into as many runs as ranks share its group (`ways`).
    """
    order = sorted(reversed(list(shapes)), key=lambda n: classes[n].order)
    groups: list[list[str]] = []
    filled = 0  # elements of the last of them
    for name in order:
        size = prod(shapes[name])
        if not groups or filled + size > bucket_size or classes[groups[-1][-1]] != classes[name]:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    spans, start = [], 0
    for group in groups:
        kind = classes[group[0]]
        runs = cut([_table(shapes[n]) for n in group], ways[kind.group])
        spans.append(Span(start, start + runs[-1], tuple(start + c for c in runs), kind, tuple(group)))
        start += runs[-1]
    return spans


def rows_between(span: Span, shapes: Mapping[str, Ints], start: int, stop: int) -> Iterator[tuple[str, Box]]:
    """(name, local box) of the rows that lie in elements [start, stop) of the stage's buffer, in order."""
    at = span.start
    for name in span.names:
        count, width = _table(shapes[name])
        low, high = max(start, at), min(stop, at + count * width)
        if low < high:
            yield name, rows(shapes[name], (low - at) // width, (high - at) // width)
        at += count * width


def copies_share(span: Span, shapes: Mapping[str, Ints], run: tuple[int, int], index: int, of: int) -> tuple[int, int]:
    """The part of a run that copy `index` of `of` equal ones saves, so that all of them share the writing."""
    boxes = [box.shape for _, box in rows_between(span, shapes, *run)]
    cuts = cut([_table(shape) for shape in boxes], of)
    return run[0] + cuts[index], run[0] + cuts[index + 1]


def _table(shape: Ints) -> tuple[int, int]:
    """(rows, elements per row); a scalar is one row."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)
