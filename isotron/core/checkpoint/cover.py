"""Do the chunks of a tensor cover it exactly once? PURE.

Boxes that lie inside a tensor, do not overlap and whose sizes add up to its size cover it; so a sweep for overlaps and
one sum decide, and only a tensor that fails pays for the search of the region to name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isotron.core.layout import Box, Ints, whole

Labelled = tuple[Box, str]


def region_text(box: Box) -> str:
    """A box as a reader would index it: `[0:4, 2:8]`; a scalar is `[]`."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True)) + "]"


def cover_error(shape: Ints, chunks: Sequence[Labelled]) -> str | None:
    """What is wrong with `chunks` (box, name of its writer) as a partition of `shape`, naming the region; or None."""
    for box, label in chunks:
        if not lies_inside(box, shape) or box.size == 0:
            return f"region {region_text(box)} of {label} is empty or not inside shape {list(shape)}"
    pair = _first_overlap(shape, chunks)
    if pair is not None:
        (a, first), (b, second) = pair
        common = a.overlap(b)
        return f"region {region_text(common or a)} is written twice, in {first} and in {second}"
    everything = whole(shape)
    if sum(box.size for box, _ in chunks) != everything.size:
        return f"region {region_text(_first_gap(everything, [box for box, _ in chunks]))} is written by nobody"
    return None


def lies_inside(box: Box, shape: Ints) -> bool:
    """Whether `box` has the dimensions of `shape` and no corner outside it."""
    return len(box.offset) == len(box.shape) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(box.offset, box.shape, shape, strict=True)
    )


def _first_overlap(shape: Ints, chunks: Sequence[Labelled]) -> tuple[Labelled, Labelled] | None:
    """Two chunks with a common element, or None: a sweep along the dimension that is cut most often."""
    if not shape:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    dim = max(range(len(shape)), key=lambda d: len({box.offset[d] for box, _ in chunks}))
    active: list[Labelled] = []
    for chunk in sorted(chunks, key=lambda c: c[0].offset[dim]):
        start = chunk[0].offset[dim]
        active = [c for c in active if c[0].offset[dim] + c[0].shape[dim] > start]
        for other in active:
            if other[0].overlap(chunk[0]) is not None:
                return other, chunk
        active.append(chunk)
    return None


def _first_gap(region: Box, boxes: Iterable[Box]) -> Box:
    """A region that no box touches; the boxes are disjoint and do not fill `region`.

    Halves the region at an edge of the boxes in it and goes on in a half that is not full, so n boxes cost n log n.
    """
    inside = [common for box in boxes if (common := box.overlap(region)) is not None]
    if not inside:
        return region
    for dim, (start, length) in enumerate(zip(region.offset, region.shape, strict=True)):
        ends = {box.offset[dim] for box in inside} | {box.offset[dim] + box.shape[dim] for box in inside}
        edges = sorted(e for e in ends if start < e < start + length)
        if not edges:
            continue
        edge = edges[len(edges) // 2]
        for low, high in ((start, edge), (edge, start + length)):
            half = Box(_put(region.offset, dim, low), _put(region.shape, dim, high - low))
            if sum(c.size for box in inside if (c := box.overlap(half)) is not None) < half.size:
                return _first_gap(half, inside)
    raise ValueError(f"no gap in {region_text(region)}: the boxes overlap or fill it")


def _put(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])
