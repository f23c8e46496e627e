"""Read a pickle without running anything of it. PURE.

Every name in it becomes an inert stand-in that only keeps what it was given; tensors become their place in the file.
Only names of the libraries that write such files may occur at all: any other one is refused. It runs in a process that
has given up all but reading (`confine.py`), never in one that trains.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
          "float8_e4m3fn", "float8_e5m2")  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
# packages whose names may occur; what they name stays inert
ROOTS = frozenset(
    ("torch", "megatron", "transformer_engine", "transformer_engine_torch", "numpy", "argparse", "collections",
     "pathlib", "signal", "apex", "enum", "modelopt", "nemo")
)  # fmt: skip
BUILTINS = frozenset(["getattr", "object", "slice", "range", "complex", "bytearray"])


class UnsafeName(Exception):
    """The pickle names something that no checkpoint needs."""


class Inert:
    """Stand-in of anything: `origin` is the name it had, `args` what it was called with, `state` what it held."""

    origin = ""

    def __new__(cls, *args: Any, **named: Any) -> Inert:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, {}  # type: ignore[attr-defined]
        return made

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Keep the state: a dict, or a dict and one of slots, or anything."""
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state.update(part)  # type: ignore[attr-defined]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Entries of a dict that was not a plain one."""

    def append(self, value: Any) -> None:
        """Elements of a list that was not a plain one."""


@dataclass(frozen=True)
class Storage:
    """Numbers in the record `data/KEY` of the archive."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's numbers lie: record, first element, sizes and strides in elements."""

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> TensorPlace:
    return TensorPlace(storage.dtype, storage.key, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _first(value: Any, *_: Any) -> Any:
    return value


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _encode(text: str, coding: str) -> bytes:
    return text.encode("latin-1" if coding in ("latin1", "latin-1") else "utf-8")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    **{("torch", name): name for name in DTYPES},
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
}


class Reader(pickle.Unpickler):
    """The unpickler with the list of names."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name; `UnsafeName` if it may not occur."""
        known = _KNOWN.get((module.replace("__builtin__", "builtins"), name))
        if known is not None:
            return known
        builtin = module in ("builtins", "__builtin__") and name in BUILTINS
        if not builtin and module.split(".")[0] not in ROOTS:
            raise UnsafeName(f"{module}.{name}")
        return type(name.split(".")[-1], (Inert,), {"origin": f"{module}.{name}"})

    def persistent_load(self, identity: Any) -> Storage:
        """A storage in the archive."""
        kind, dtype, key, _, count = identity
        if kind != "storage" or not isinstance(dtype, str):
            raise UnsafeName(f"persistent id {kind!r}")
        return Storage(dtype, str(key), int(count))


def read_pickle(stream: BinaryIO) -> Any:
    """The value in a stream, made of plain containers, numbers, text, `TensorPlace` and `Inert`."""
    return Reader(stream).load()


def plain(value: Any) -> Any:
    """A value as JSON has it; whatever JSON has not becomes None."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return None
