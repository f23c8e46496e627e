"""Safetensors files written from tensors that are made one at a time.

A file's header needs only names, dtypes and shapes, so each tensor exists just while its bytes are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isotron.core.checkpoint.disk import write_blocks
from isotron.core.checkpoint.files import ALIGN, dtype_name
from isotron.core.checkpoint.format import DTYPES, FileEntry
from isotron.core.layout import Ints, whole


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: what it will be, and the function that makes it."""

    key: str
    dtype: torch.dtype
    shape: Ints
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Payload in bytes."""
        return whole(self.shape).size * self.dtype.itemsize


def deal(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Cut a sequence into files of at most `limit` bytes, or one tensor."""
    files: list[list[Planned]] = []
    room = -1
    for tensor in tensors:
        if tensor.bytes > room:
            files.append([])
            room = limit
        files[-1].append(tensor)
        room = max(0, room - tensor.bytes)
    return files


def write_planned(file: Path, tensors: Sequence[Planned]) -> FileEntry:
    """Write one file, synced to disk; wide elements first, so that every tensor is aligned."""
    return write_blocks(file, _blocks(sorted(tensors, key=lambda t: -t.dtype.itemsize)))


def _blocks(tensors: Sequence[Planned]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for t in tensors:
        code, stop = DTYPES[dtype_name(t.dtype)][0], start + t.bytes
        header[t.key] = {"dtype": code, "shape": t.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    yield len(text).to_bytes(8, "little") + text
    for t in tensors:
        made = t.make()
        if made.dtype != t.dtype or tuple(made.shape) != t.shape:
            raise RuntimeError(f"{t.key} came as {made.dtype} {tuple(made.shape)}, planned {t.dtype} {t.shape}")
        yield memoryview(made.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        del made
