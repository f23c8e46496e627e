"""Write safetensors files as streams.

Tensors go through in slabs of at most 64 MB, so a save needs no second copy of a rank's state in host memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isotron.core.checkpoint.disk import write_blocks
from isotron.core.checkpoint.format import DTYPES, FileEntry
from isotron.core.layout import Box

SLAB_BYTES = 2**26
ALIGN = 8


@dataclass(frozen=True)
class Item:
    """One chunk to be stored: `tensor` (any strides and device) is region `box` of the global tensor `name`."""

    name: str
    key: str
    box: Box
    tensor: torch.Tensor

    @property
    def bytes(self) -> int:
        """Payload in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in the manifest: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def write_tensors(file: Path, items: Sequence[Item], sync: bool = True) -> FileEntry:
    """Write one safetensors file, synced to disk; wide elements first, so that every tensor is aligned."""
    items = sorted(items, key=lambda item: -item.tensor.element_size())
    return write_blocks(file, _blocks(items), sync)


def _blocks(items: Sequence[Item]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: header length (8 bytes, little-endian), JSON header, payload."""
    header, start = {}, 0
    for item in items:
        code = DTYPES[dtype_name(item.tensor.dtype)][0]
        stop = start + item.bytes
        header[item.key] = {"dtype": code, "shape": item.box.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    yield len(text).to_bytes(8, "little")
    yield text
    for item in items:
        for slab in _slabs(item.tensor.detach()):
            flat = slab.cpu().contiguous().reshape(-1).view(torch.uint8)
            yield memoryview(flat.numpy())  # type: ignore[arg-type]


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in row-major order, in parts of at most `SLAB_BYTES` (or one element)."""
    if tensor.numel() * tensor.element_size() <= SLAB_BYTES or tensor.ndim == 0:
        yield tensor
        return
    rows = SLAB_BYTES // (tensor[0].numel() * tensor.element_size())
    for part in torch.split(tensor, max(rows, 1)):
        if rows:
            yield part
        else:
            yield from _slabs(part[0])
