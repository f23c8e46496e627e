"""Boxes and placements: which part of a global tensor a rank holds, and where in its local tensor it lies.

PURE: integers only. Everything that moves or names tensors (initialisation, tensor parallelism, optimizer shards,
checkpoints, conversion, memory planning) asks this file and nothing else.

A *box* is an offset and a shape. A *piece* says that one box of the global tensor is one box of the local tensor. A
local tensor is a list of pieces: one for a plain split, several for a fused tensor (q|k|v, gate|up), none for a shard
that holds only padding. Local elements that no piece covers are padding: zero, never saved, never trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular region: `offset` and `shape`, one entry per dimension."""

    offset: Ints
    shape: Ints

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of this box in a tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """The common region of two boxes of one tensor, or None."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def relative_to(self, outer: Box) -> Box:
        """The same region with offsets counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def shifted(self, corner: Ints) -> Box:
        """The same region moved by `corner`."""
        return Box(tuple(a + b for a, b in zip(self.offset, corner, strict=True)), self.shape)


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class Piece:
    """`global_box` of the global tensor is `local_box` of the local one; both have the same shape."""

    global_box: Box
    local_box: Box

    def restricted(self, local: Box) -> Piece | None:
        """The part of this piece inside `local`, its local offsets counted from the corner of `local`."""
        common = self.local_box.overlap(local)
        if common is None:
            return None
        inside = common.relative_to(self.local_box)
        return Piece(inside.shifted(self.global_box.offset), common.relative_to(local))


@dataclass(frozen=True)
class Part:
    """One section of a fused dimension: `count` units of `unit` elements, split over an axis in whole units.

    With fewer units than ranks each unit is held by several neighbouring ranks (key/value heads under wide TP).
    `padded` is the number of units after padding at the end (vocabularies); padding is held but never saved.
    """

    count: int
    unit: int = 1
    padded: int | None = None

    def shard(self, index: int, of: int) -> tuple[int, int, int, int, int]:
        """Rank `index` of `of`: (first element, real elements, held elements, replica index, replicas)."""
        units = self.count if self.padded is None else self.padded
        if units % of == 0:
            each, replicas = units // of, 1
        elif of % units == 0:
            each, replicas = 1, of // units
        else:
            raise ValueError(f"{units} units cannot be split over {of} ranks")
        first = (index // replicas) * each
        real = max(0, min(each, self.count - first))
        return first * self.unit, real * self.unit, each * self.unit, index % replicas, replicas


@dataclass(frozen=True)
class Split:
    """A tensor split along `dim` over the mesh axis `axis`, section by section.

    Axes are named as in `mesh.py`; a mesh without an expert view of its own (`etp`) splits experts over `tp`.
    """

    dim: int
    parts: tuple[Part, ...]
    axis: str = "tp"


@dataclass(frozen=True)
class Rule:
    """One entry of a model's layout table.

    pattern: glob on global parameter names. shape: global, without padding. split: None = whole on every rank.
    region: what the activation that meets the parameter is split over, "sequence" (split over TP under sequence
    parallelism only) or "heads" (always split over TP). init: "normal", "zeros" or "ones", with `std` for "normal".
    decay: whether weight decay applies. buffer: no parameter; float32 or wider, without a gradient, saved. experts: the
    rows are those of so many experts, one below the other, and runs of experts are dealt over the axis `ep`. lesser:
    (rows, factor): so many first rows begin that much smaller.
    """

    pattern: str
    shape: Ints
    split: Split | None = None
    region: str = "sequence"
    init: str = "normal"
    std: float = 0.0
    decay: bool = True
    buffer: bool = False
    experts: int = 0
    lesser: tuple[int, float] = (0, 1.0)


@dataclass(frozen=True)
class Table:
    """The layout table of one model: rules, and ties as (alias, name) pairs of parameter names."""

    rules: tuple[Rule, ...]
    ties: tuple[tuple[str, str], ...] = ()

    @cached_property
    def alike(self) -> bool:
        """Whether all blocks have the same rules: none names one of them."""
        return all(r.pattern.startswith(("layers.*.", "*")) or "layers." not in r.pattern for r in self.rules)

    @cached_property
    def _known(self) -> dict[str, Rule]:
        return {}

    def rule(self, name: str) -> Rule:
        """The rule of a parameter; a parameter without one is an error."""
        key = name.split(".", 2)[2] if self.alike and name.startswith("layers.") else f"={name}"
        if key not in self._known:
            found = next((rule for rule in self.rules if fnmatchcase(name, rule.pattern)), None)
            if found is None:
                raise KeyError(f"parameter {name!r} has no entry in the layout table")
            self._known[key] = found
        return self._known[key]

    def canonical(self, name: str) -> str:
        """The name under which a tied parameter is initialised, counted and stored."""
        return dict(self.ties).get(name, name)


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one tensor: its local shape, its pieces, and which of them it owns.

    `replicas[i]` = (index, count) of piece i among the ranks of the split axis that hold the same box; a tensor
    without a split is one piece replicated over the whole axis.
    """

    global_shape: Ints
    shape: Ints
    pieces: tuple[Piece, ...]
    replicas: tuple[tuple[int, int], ...]


def shard(rule: Rule, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> Shard:
    """The shard of `rule`'s tensor at a mesh coordinate (axis name -> index) of a mesh (axis name -> size)."""
    ways = sizes.get("ep", 1) if rule.experts else 1
    if ways == 1:
        return _split(rule, coordinate, sizes)
    if rule.experts % ways:
        raise ValueError(f"{rule.pattern}: {rule.experts} experts cannot be dealt to {ways} ranks")
    height, split = rule.shape[0] // ways, rule.split
    if split is not None and split.dim == 0:
        split = replace(split, parts=split.parts[: len(split.parts) // ways])
    one = _split(replace(rule, shape=(height, *rule.shape[1:]), split=split), coordinate, sizes)
    corner = (coordinate["ep"] * height, *(0 for _ in rule.shape[1:]))
    pieces = (Piece(piece.global_box.shifted(corner), piece.local_box) for piece in one.pieces)
    return Shard(rule.shape, one.shape, tuple(pieces), one.replicas)


def _split(rule: Rule, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> Shard:
    """The shard of a tensor over the axis of its split; without one it is whole on every rank of the axis."""
    shape = rule.shape
    axis = rule.split.axis if rule.split is not None else "etp" if rule.experts else "tp"
    axis = axis if axis in sizes else "tp"
    index, of = coordinate[axis], sizes[axis]
    if rule.split is None:
        return Shard(shape, shape, (Piece(whole(shape), whole(shape)),), ((index, of),))
    dim = rule.split.dim
    pieces, replicas = [], []
    global_start = local_start = 0
    for part in rule.split.parts:
        first, real, held, replica, count = part.shard(index, of)
        if count > 1 and rule.region != "heads":
            raise ValueError(f"{rule.pattern}: {part.count} units over {of} ranks would be held {count} times")
        if real:
            at = [0] * len(shape), [0] * len(shape)
            at[0][dim], at[1][dim] = global_start + first, local_start
            size = tuple(real if d == dim else n for d, n in enumerate(shape))
            pieces.append(Piece(Box(tuple(at[0]), size), Box(tuple(at[1]), size)))
            replicas.append((replica, count))
        global_start += part.count * part.unit
        local_start += held
    if global_start != shape[dim]:
        raise ValueError(f"parts of {rule.pattern} sum to {global_start}, dimension {dim} is {shape[dim]}")
    local = tuple(local_start if d == dim else n for d, n in enumerate(shape))
    return Shard(shape, local, *_joined(pieces, replicas, dim))


def _joined(pieces: list[Piece], replicas: list[tuple[int, int]], dim: int) -> tuple[Any, Any]:
    """Pieces that follow one another in both tensors as one: without a split, experts are one piece, not hundreds."""
    found: list[tuple[Piece, tuple[int, int]]] = []
    for piece, replica in zip(pieces, replicas, strict=True):
        if found and found[-1][1] == replica:
            ends = [_grown(a, b, dim) for a, b in zip(_boxes(found[-1][0]), _boxes(piece), strict=True)]
            joined = [box for box in ends if box is not None]
            if len(joined) == len(ends):
                found[-1] = Piece(*joined), replica
                continue
        found.append((piece, replica))
    return tuple(p for p, _ in found), tuple(r for _, r in found)


def _boxes(piece: Piece) -> tuple[Box, Box]:
    return piece.global_box, piece.local_box


def _grown(a: Box, b: Box, dim: int) -> Box | None:
    """Both boxes as one, where b begins along `dim` where a ends."""
    if a.offset[dim] + a.shape[dim] != b.offset[dim]:
        return None
    return Box(a.offset, tuple(n + b.shape[d] if d == dim else n for d, n in enumerate(a.shape)))


def rows(shape: Ints, start: int, stop: int) -> Box:
    """Rows [start, stop) of a local tensor, whole in every other dimension; a scalar counts as one row."""
    return Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))


def cut(sizes: Iterable[tuple[int, int]], ways: int) -> list[int]:
    """Cut a flat buffer of tensors, given as (rows, elements per row), into `ways` runs at row boundaries.

    Returns ways+1 element offsets. Each cut is the row boundary nearest to an even division, so runs differ by at most
    about one row; some may be empty.
    """
    return list(_cut(tuple(sizes), ways))


@lru_cache(maxsize=512)
def _cut(sizes: tuple[tuple[int, int], ...], ways: int) -> tuple[int, ...]:
    """`cut`, which stages of equal blocks ask for again and again."""
    starts = [0, *accumulate(n * width for n, width in sizes)]
    total, cuts = starts[-1], [0]
    for k in range(1, ways):
        want = total * k // ways
        i = max(0, min(bisect_right(starts, want) - 1, len(sizes) - 1))
        width = sizes[i][1] if sizes else 1
        nearest = starts[i] + (want - starts[i] + width // 2) // max(width, 1) * width
        cuts.append(max(cuts[-1], min(nearest, total)))
    return (*cuts, total)


@dataclass(frozen=True)
class Placed:
    """One parameter as a rank holds it: its canonical name, rule and shard.

    `counts` is False on the second owner of a tied parameter: it is neither saved nor counted in the norm there.
    """

    name: str
    rule: Rule
    shard: Shard
    counts: bool = True

    def owned(self) -> list[Piece]:
        """Pieces that this rank alone answers for among the ranks of the split axis."""
        pairs = zip(self.shard.pieces, self.shard.replicas, strict=True)
        return [piece for piece, (index, _) in pairs if index == 0 and self.counts]
