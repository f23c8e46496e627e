"""Where a tensor of Megatron's lies: its parts in files, as data. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isotron.core.layout import Box, Ints


@dataclass(frozen=True)
class Chunk:
    """Region `box` of a tensor: its numbers lie in a row from byte `start` of `file` on."""

    box: Box
    file: Path
    start: int


@dataclass(frozen=True)
class Stored:
    """One tensor of one layer, whole: torch's name of its dtype, shape, and where its parts lie."""

    dtype: str
    shape: Ints
    chunks: tuple[Chunk, ...]
