"""Megatron's indexed token files: `PREFIX.bin` (tokens back to back) and `PREFIX.idx` (where each sequence lies). PURE.

The .idx, little-endian, S sequences, D = documents + 1:

    9 bytes "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 S | u64 D
    | i32[S] lengths (tokens) | i64[S] pointers (bytes into the .bin) | i64[D] first sequence of each document, then S
    | i8[S] modes, in multimodal files only

`indexed_writer` writes them. A file is checked when it is opened, so that nothing breaks hours later in a run.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from isotron.core.errors import Refused, refuse

MAGIC = b"MMIDIDX\x00\x00"
CHECK_BLOCK = 1 << 22  # sequences that `check` looks at together
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
INTEGER_CODES = (1, 2, 3, 4, 5, 8)
Array: TypeAlias = npt.NDArray[np.generic]
Int64s: TypeAlias = npt.NDArray[np.int64]


def bin_path(prefix: str | Path) -> Path:
    """PREFIX.bin"""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """PREFIX.idx"""
    return Path(f"{prefix}.idx")


def dtype_for(vocab_size: int) -> type[np.number]:
    """What Megatron stores ids of such a vocabulary in: uint16 below 65500 entries, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """The sequences of one .bin/.idx pair, mapped into memory read-only.

    lengths: i32[S] tokens. pointers: i64[S] bytes. document_indices: i64[D]. modes: i8[S] or None. dtype: of a token.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise refuse(f"data {prefix}", f"there is no file {path}", "a prefix whose .bin and .idx both exist")
        code, sequences, documents, modal = _read_header(idx_path(prefix))
        self.dtype: np.dtype[np.generic] = np.dtype(CODES[code]).newbyteorder("<")
        raw = np.memmap(idx_path(prefix), mode="r")
        at = HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, at)
        at += self.lengths.nbytes
        self.pointers: Int64s = np.frombuffer(raw, "<i8", sequences, at)
        at += self.pointers.nbytes
        self.document_indices: Int64s = np.frombuffer(raw, "<i8", documents, at)
        at += self.document_indices.nbytes
        self.modes = np.frombuffer(raw, "<i1", sequences, at) if modal else None
        _check_size(self, bin_path(prefix).stat().st_size)
        self._bytes = np.memmap(bin_path(prefix), mode="r")

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences."""
        return int(np.sum(self.lengths, dtype=np.int64))

    def __getitem__(self, index: int) -> Array:
        """The tokens of sequence `index`, as stored."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Array:
        """`length` tokens (default: the rest) of sequence `index` from token `offset`, as stored, not copied."""
        count = int(self.lengths[index]) - offset if length is None else length
        start = int(self.pointers[index]) + offset * self.dtype.itemsize
        return np.frombuffer(self._bytes, self.dtype, count, start)

    def check(self) -> None:
        """Read the whole index and refuse a negative length, a gap between sequences, or a broken document list."""
        for at in range(0, len(self), CHECK_BLOCK):
            # one more, so that the last of a block is held against the first of the next
            lengths = self.lengths[at : at + CHECK_BLOCK + 1].astype(np.int64)
            pointers = self.pointers[at : at + CHECK_BLOCK + 1]
            ends = pointers + lengths * self.dtype.itemsize
            starts = np.flatnonzero(pointers[1:] != ends[:-1])
            if lengths.min() < 0:
                worst = int(np.argmin(lengths))
                raise _damaged(self.prefix, f"sequence {at + worst} has the length {int(lengths[worst])}")
            if len(starts):
                case = f"sequence {at + int(starts[0]) + 1} does not start where the one before it ends"
                raise _damaged(self.prefix, case)
        steps = np.flatnonzero(self.document_indices[1:] < self.document_indices[:-1])
        if len(steps):
            raise _damaged(self.prefix, f"document {int(steps[0])} ends before it starts")


def _read_header(path: Path) -> tuple[int, int, int, bool]:
    """(dtype code, S, D, whether modes follow), refused unless the file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        raise _damaged(path, f"it has {size} bytes, the header alone takes {HEADER.size}")
    magic, version, code, sequences, documents = HEADER.unpack(head)
    if magic != MAGIC:
        raise _damaged(path, f"it starts with {magic!r}, an index starts with {MAGIC!r}")
    if version != 1:
        raise _damaged(path, f"its version is {version}, only version 1 is known")
    if code not in INTEGER_CODES:
        kind = f"{CODES[code].__name__}, token ids are integers" if code in CODES else "unknown"
        raise _damaged(path, f"its dtype code is {code}: {kind}")
    if sequences == 0:
        raise _damaged(path, "it holds no sequences")
    plain = HEADER.size + 12 * sequences + 8 * documents
    if size not in (plain, plain + sequences):
        case = f"{sequences} sequences and {documents} document entries take {plain} bytes, it has {size}"
        raise _damaged(path, case)
    return code, sequences, documents, size == plain + sequences


def _check_size(data: IndexedDataset, bin_size: int) -> None:
    """Refuse an index whose last sequence ends outside the .bin, or whose documents end outside the sequences."""
    first, last = int(data.pointers[0]), int(data.pointers[-1])
    end = last + int(data.lengths[-1]) * data.dtype.itemsize
    if first < 0 or last < 0 or int(data.lengths[-1]) < 0:
        raise _damaged(data.prefix, f"negative numbers: pointers {first} and {last}, last length {data.lengths[-1]}")
    if bin_size == 0 or end > bin_size:
        raise _damaged(data.prefix, f"the index ends at byte {end}, {bin_path(data.prefix)} has {bin_size}")
    if len(data.document_indices) and not 0 <= int(data.document_indices[-1]) <= len(data):
        case = f"the last document ends at sequence {data.document_indices[-1]}, there are {len(data)}"
        raise _damaged(data.prefix, case)


def _damaged(what: str | Path, case: str) -> Refused:
    return refuse(f"data {what}", case, "run `isotron preprocess` again, or copy the .bin and .idx again")
