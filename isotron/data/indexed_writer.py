"""Writing and merging indexed token files in constant memory. PURE.

Tokens, lengths and document ends go straight to temporary files; `close` computes the pointers block by block, syncs,
and renames. Until then the target names do not exist, and after an error they still hold what they held before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse
from isotron.data.indexed import CODES, HEADER, MAGIC, IndexedDataset, bin_path, dtype_for, idx_path
from isotron.data.info import read_info, write_info

BLOCK = 1 << 20
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.generic]


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. A context manager: leaving it normally closes, an exception aborts.

    With `vocab_size` every id must be below it; `dtype` overrides what the vocabulary size implies.
    """

    def __init__(self, prefix: str | Path, vocab_size: int | None = None, dtype: npt.DTypeLike | None = None) -> None:
        if dtype is None:
            dtype = dtype_for(vocab_size) if vocab_size is not None else np.int32
        self.prefix, self.vocab_size = str(prefix), vocab_size
        self.dtype = np.dtype(dtype)
        self._code = next(code for code, kind in CODES.items() if np.dtype(kind) == self.dtype)
        self._limit = int(np.iinfo(self.dtype).max) + 1
        self._limit = min(self._limit, vocab_size) if vocab_size is not None else self._limit
        self.sequences = self.documents = self.tokens = 0
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._parts = {kind: Path(f"{prefix}.{kind}.tmp-{os.getpid()}") for kind in ("bin", "idx", "lengths", "ends")}
        self._open = {kind: self._parts[kind].open("wb") for kind in ("bin", "lengths", "ends")}
        self._ends: list[int] = []

    def add_document(self, ids: Ids, lengths: Sequence[int] | None = None) -> None:
        """One document: one sequence, or several whose `lengths` sum to the number of ids."""
        self._write_tokens(np.asarray(ids), np.asarray([len(ids)] if lengths is None else lengths, dtype=np.int64))
        self._end_document(self.sequences)

    def add_documents(self, ids: Ids, lengths: Ids) -> None:
        """Several documents of one sequence each: their ids in a row, and the length of each."""
        before = self.sequences
        self._write_tokens(np.asarray(ids), np.asarray(lengths, dtype=np.int64))
        for end in range(before + 1, self.sequences + 1):
            self._end_document(end)

    def _write_tokens(self, ids: npt.NDArray[np.generic], lengths: npt.NDArray[np.int64]) -> None:
        if int(lengths.sum()) != len(ids) or (len(lengths) and int(lengths.min()) < 0):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, there are {len(ids)} ids")
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise refuse(
                f"a sequence of {int(lengths.max())} tokens for {self.prefix}",
                "the file format stores a sequence's length in 32 bits",
                "documents below 2147483648 tokens",
            )
        self._check_range(ids)
        self._open["bin"].write(ids.astype(self.dtype, copy=False).tobytes())
        self._open["lengths"].write(lengths.astype("<i4").tobytes())
        self.sequences += len(lengths)
        self.tokens += len(ids)

    def _check_range(self, ids: npt.NDArray[np.generic]) -> None:
        if not len(ids):
            return
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"token ids are integers, these are {ids.dtype}")
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self._limit:
            bad = least if least < 0 else most
            vocabulary = "" if self.vocab_size is None else f", the vocabulary has {self.vocab_size} entries"
            raise refuse(
                f"token id {bad} for {self.prefix}",
                f"ids here are 0..{self._limit - 1}: stored as {self.dtype.name}{vocabulary}",
                f"a vocabulary of at least {most + 1} entries" if least >= 0 else "ids >= 0",
            )

    def _end_document(self, sequence: int) -> None:
        self._ends.append(sequence)
        self.documents += 1
        if len(self._ends) >= BLOCK:
            self._flush_ends()

    def _flush_ends(self) -> None:
        self._open["ends"].write(np.asarray(self._ends, dtype="<i8").tobytes())
        self._ends = []

    def extend(self, source: IndexedDataset) -> None:
        """Append all sequences and documents of another pair of the same token type, block by block."""
        source.check()
        left = source.tokens * source.dtype.itemsize
        with bin_path(source.prefix).open("rb") as tokens:
            tokens.seek(int(source.pointers[0]))
            while left > 0 and (chunk := tokens.read(min(left, 16 * BLOCK))):
                self._open["bin"].write(chunk)
                left -= len(chunk)
        self._open["lengths"].write(source.lengths.tobytes())
        self._flush_ends()
        self._open["ends"].write((source.document_indices[1:] + self.sequences).astype("<i8").tobytes())
        self.sequences += len(source)
        self.documents += source.documents
        self.tokens += source.tokens

    def close(self) -> None:
        """Write the index, sync, and move both files to their names; without any sequence this is refused."""
        if self.sequences == 0:
            self.abort()
            raise refuse(f"output {self.prefix}", "there is nothing to write: no document", "input with text in it")
        self._flush_ends()
        for stream in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        with self._parts["idx"].open("wb") as index:
            self._write_index(index)
            index.flush()
            os.fsync(index.fileno())
        idx_path(self.prefix).unlink(missing_ok=True)  # never an old index beside a new .bin
        self._parts["bin"].replace(bin_path(self.prefix))
        self._parts["idx"].replace(idx_path(self.prefix))
        for kind in ("lengths", "ends"):
            self._parts[kind].unlink()

    def _write_index(self, index: BinaryIO) -> None:
        index.write(HEADER.pack(MAGIC, 1, self._code, self.sequences, self.documents + 1))
        with self._parts["lengths"].open("rb") as lengths:
            shutil.copyfileobj(lengths, index, BLOCK)
        for block in pointers(_blocks(self._parts["lengths"]), self.dtype.itemsize):
            index.write(block.astype("<i8").tobytes())
        index.write(np.zeros(1, dtype="<i8").tobytes())
        with self._parts["ends"].open("rb") as ends:
            shutil.copyfileobj(ends, index, BLOCK)

    def abort(self) -> None:
        """Remove what was written; the target names stay as they were."""
        for stream in self._open.values():
            stream.close()
        for path in self._parts.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def pointers(blocks: Iterator[npt.NDArray[np.int32]], itemsize: int) -> Iterator[npt.NDArray[np.int64]]:
    """The byte offset of every sequence from blocks of lengths, in 64 bits."""
    start = 0
    for block in blocks:
        ends = start + np.cumsum(block.astype(np.int64) * itemsize)
        yield np.concatenate(([start], ends[:-1]))
        start = int(ends[-1])


def _blocks(path: Path) -> Iterator[npt.NDArray[np.int32]]:
    with path.open("rb") as stream:
        while raw := stream.read(4 * BLOCK):
            yield np.frombuffer(raw, "<i4")


def merge(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Join pairs into one: byte for byte what preprocessing the joined inputs gives.

    Refused when their token types or the tokenizers that their notes name differ, or when the output is an input.
    """
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    notes = [read_info(prefix) for prefix in prefixes]
    _check_mergeable(sources, [note.get("tokenizer") for note in notes if note])
    if Path(output).absolute() in {Path(prefix).absolute() for prefix in prefixes}:
        raise refuse(f"merge into {output}", "the output is one of the inputs", "another --output-prefix")
    with IndexedWriter(output, dtype=sources[0].dtype.newbyteorder("=")) as writer:
        for source in sources:
            writer.extend(source)
    if notes[0] and all(notes):
        ends = all(note and note.get("append_eod") for note in notes)
        totals = {"documents": writer.documents, "tokens": writer.tokens, "append_eod": ends}
        write_info(output, notes[0] | totals)


def _check_mergeable(sources: Sequence[IndexedDataset], tokenizers: Sequence[object]) -> None:
    kinds = {source.dtype.name for source in sources}
    if len(kinds) == 1 and not any(source.modes is not None for source in sources):
        if all(tokenizer == tokenizers[0] for tokenizer in tokenizers):
            return
        case = "their .info.json notes name different tokenizers"
    else:
        case = "only text files whose ids are stored in one type can be joined"
    listed = ", ".join(f"{source.prefix} ({source.dtype.name})" for source in sources) or "nothing"
    raise refuse(f"merge of {listed}", case, "files that were preprocessed with the same tokenizer")
