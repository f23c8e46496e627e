"""How tensor parallelism cuts Megatron's tensors, in one place for reading and writing. PURE.

Rows are cut group by group for q|k|v; a rank's part of gate and up is its gate, then its up.
"""

from __future__ import annotations

from collections.abc import Sequence

from isotron.core.layout import Box, Ints, whole

# by the end of their names; all other tensors are held by every rank
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight",
        "linear_fc1.bias")  # fmt: skip
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def whole_shape(name: str, part: Ints, tp: int) -> Ints:
    """The shape of the tensor of which each of `tp` ranks holds a part of shape `part`."""
    if name.endswith(COLUMNS):
        return (*part[:-1], part[-1] * tp)
    return (part[0] * tp, *part[1:]) if name.endswith(ROWS) else part


def part_shape(name: str, shape: Ints, tp: int) -> Ints:
    """The shape of a rank's part of a tensor of `shape`."""
    if name.endswith(COLUMNS):
        return (*shape[:-1], shape[-1] // tp)
    return (shape[0] // tp, *shape[1:]) if name.endswith(ROWS) else shape


def regions(name: str, shape: Ints, tp: int, gated: bool) -> list[list[Box]]:
    """For each rank, the regions of the whole tensor that lie one below the other in its part."""
    if name.endswith(COLUMNS):
        width = shape[-1] // tp
        return [[Box((*(0 for _ in shape[:-1]), t * width), (*shape[:-1], width))] for t in range(tp)]
    if not name.endswith(ROWS):
        return [[whole(shape)] for _ in range(tp)]
    pieces = 2 if gated and ".linear_fc1." in name else 1
    rows, rest = shape[0] // (pieces * tp), shape[1:]
    corner = tuple(0 for _ in rest)
    return [[Box(((p * tp + t) * rows, *corner), (rows, *rest)) for p in range(pieces)] for t in range(tp)]


def uncut(sizes: Sequence[tuple[str, int]], tp: int) -> list[str]:
    """Which of the sizes, given as (what, number), `tp` does not divide."""
    return [f"{what} {n}" for what, n in sizes if n % tp]
