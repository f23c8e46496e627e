"""Archives as `torch.save` writes them, made as a stream: their size is known before any tensor exists.

One tensor is in memory at a time. A zip file without compression, with 64-bit sizes; records begin at multiples of 64.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isotron.core.layout import Ints, whole

ALIGN = 64
_STORAGES = {torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
             torch.bfloat16: torch.BFloat16Storage}  # fmt: skip
_LOCAL, _CENTRAL, _END64, _LOCATE64, _END = 0x04034B50, 0x02014B50, 0x06064B50, 0x07064B50, 0x06054B50
_FULL = 0xFFFFFFFF


@dataclass(frozen=True)
class Slot:
    """A tensor to be: its place in the pickle, and the record of its numbers."""

    key: str
    dtype: torch.dtype
    shape: Ints


@dataclass(frozen=True)
class Record:
    """One file of the archive: name, bytes, and the function that makes them."""

    name: str
    size: int
    make: Callable[[], bytes | memoryview]


class _Pickler(pickle.Pickler):
    """Slots become tensors whose storage is a record."""

    def persistent_id(self, obj: Any) -> Any:
        """Storages."""
        if isinstance(obj, tuple) and len(obj) == 2 and obj[0] is Slot:
            slot: Slot = obj[1]
            return "storage", _STORAGES[slot.dtype], slot.key, "cpu", whole(slot.shape).size
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Tensors."""
        if not isinstance(obj, Slot):
            return NotImplemented
        stride = [1]
        for n in reversed(obj.shape[1:]):
            stride.insert(0, stride[0] * n)
        arguments: tuple[Any, ...] = ((Slot, obj), 0, obj.shape, tuple(stride[: len(obj.shape)]), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


def records(value: Any, slots: Sequence[tuple[Slot, Callable[[], Tensor]]] = ()) -> list[Record]:
    """The files of an archive of `value`, in which `Slot` stands for a tensor."""
    stream = io.BytesIO()
    _Pickler(stream, 2).dump(value)
    fixed = {"data.pkl": stream.getvalue(), "byteorder": b"little"}
    found = [_fixed(name, content) for name, content in fixed.items()]
    found += [Record(f"archive/data/{s.key}", whole(s.shape).size * s.dtype.itemsize, _bytes(s, m)) for s, m in slots]
    return [*found, _fixed("version", b"3\n")]


def _fixed(name: str, content: bytes) -> Record:
    return Record(f"archive/{name}", len(content), lambda: content)


def _bytes(slot: Slot, make: Callable[[], Tensor]) -> Callable[[], memoryview]:
    def made() -> memoryview:
        tensor = make()
        if tensor.dtype != slot.dtype or tuple(tensor.shape) != slot.shape:
            raise RuntimeError(f"{slot.key} came as {tensor.dtype} {tuple(tensor.shape)}, planned {slot}")
        return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

    return made


def _padding(at: int, name: str) -> int:
    """Bytes after a local header of which the record begins at a multiple of 64."""
    return -(at + 30 + len(name) + 20 + 4) % ALIGN


def size_of(files: Sequence[Record]) -> int:
    """Bytes of the archive."""
    at = 0
    for r in files:
        at += 30 + len(r.name) + 20 + 4 + _padding(at, r.name) + r.size
    return at + sum(46 + len(r.name) + 28 for r in files) + 56 + 20 + 22


def blocks(files: Sequence[Record]) -> Iterator[bytes | memoryview]:
    """The archive, piece by piece."""
    at, central = 0, b""
    for r in files:
        content, pad = r.make(), _padding(at, r.name)
        if len(content) != r.size:
            raise RuntimeError(f"{r.name} has {len(content)} bytes, planned {r.size}")
        crc, name = zlib.crc32(content), r.name.encode()
        extra = struct.pack("<HHQQ", 1, 16, r.size, r.size) + struct.pack("<HH", 0x4246, pad) + b"Z" * pad
        yield (
            struct.pack("<IHHHHHIIIHH", _LOCAL, 45, 0, 0, 0, 33, crc, _FULL, _FULL, len(name), len(extra))
            + name
            + extra
        )
        yield content
        more = struct.pack("<HHQQQ", 1, 24, r.size, r.size, at)
        central += struct.pack("<IHHHHHHIIIHHHHHII", _CENTRAL, 45, 45, 0, 0, 0, 33, crc, _FULL, _FULL, len(name), 28, 0,
                               0, 0, 0, _FULL) + name + more  # fmt: skip
        at += 30 + len(name) + len(extra) + r.size
        del content
    yield central
    n, end = len(files), at + len(central)
    yield struct.pack("<IQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, n, n, len(central), at)
    yield struct.pack("<IIQI", _LOCATE64, 0, end, 1)
    yield struct.pack("<IHHHHIIH", _END, 0, 0, 0xFFFF, 0xFFFF, _FULL, _FULL, 0)
