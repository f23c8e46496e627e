"""Writing and merging indexed token files in constant memory. PURE.

Tokens, lengths and document ends go straight to temporary files; `close` computes the pointers block by block, syncs,
and renames. Until then the target names do not exist, and after an error they still hold what they held before.
A resumable writer has fixed temporary names: `mark` says how far they are on disk, `rewind` goes on from there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
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


STREAMS = ("bin", "lengths", "ends")


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. A context manager: leaving it normally closes, an exception aborts.

    With `vocab_size` every id must be below it; `dtype` overrides what the vocabulary size implies. resumable: the
    temporary files keep their names from one process to the next; only one process at a time may have them.
    multimodal: every sequence has a mode (0 text, 1 image), which stands behind the index.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab_size: int | None = None,
        dtype: npt.DTypeLike | None = None,
        resumable: bool = False,
        multimodal: bool = False,
    ) -> None:
        if dtype is None:
            dtype = dtype_for(vocab_size) if vocab_size is not None else np.int32
        self.prefix, self.vocab_size = str(prefix), vocab_size
        self.dtype = np.dtype(dtype)
        self._code = next(code for code, kind in CODES.items() if np.dtype(kind) == self.dtype)
        self._limit = int(np.iinfo(self.dtype).max) + 1
        self._limit = min(self._limit, vocab_size) if vocab_size is not None else self._limit
        self.sequences = self.documents = self.tokens = 0
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        end = "part" if resumable else f"tmp-{os.getpid()}"
        streams = (*STREAMS, "modes") if multimodal else STREAMS
        self._parts = {kind: Path(f"{prefix}.{kind}.{end}") for kind in ("idx", *streams)}
        self._open = {kind: _take(self._parts[kind], self.prefix) for kind in streams}

    def mark(self) -> dict[str, int]:
        """Bring what is written to disk; how far that is, for `rewind`."""
        for stream in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
        sizes = {kind: stream.tell() for kind, stream in self._open.items()}
        return {"sequences": self.sequences, "documents": self.documents, "tokens": self.tokens, **sizes}

    def rewind(self, mark: Mapping[str, int]) -> bool:
        """Go on behind an earlier `mark`; False when the temporary files no longer reach so far."""
        if any(os.fstat(stream.fileno()).st_size < mark[kind] for kind, stream in self._open.items()):
            return False
        for kind, stream in self._open.items():
            stream.truncate(mark[kind])
            stream.seek(mark[kind])
        self.sequences, self.documents, self.tokens = mark["sequences"], mark["documents"], mark["tokens"]
        return True

    def restart(self) -> None:
        """Forget what the temporary files held."""
        self.rewind(dict.fromkeys(("sequences", "documents", "tokens", *self._open), 0))

    def add_document(self, ids: Ids, lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None) -> None:
        """One document: one sequence, or several whose `lengths` sum to the number of ids."""
        sizes = [len(ids)] if lengths is None else lengths
        self.add_documents(ids, sizes, [len(sizes)], modes)

    def add_documents(self, ids: Ids, lengths: Ids, sequences: Ids | None = None, modes: Ids | None = None) -> None:
        """Several documents: their ids in a row, the length of each sequence, and each document's sequences (1)."""
        before = self.sequences
        sizes = np.asarray(lengths, dtype=np.int64)
        counts = np.ones_like(sizes) if sequences is None else np.asarray(sequences, dtype=np.int64)
        if int(counts.sum()) != len(sizes) or (len(counts) and int(counts.min()) < 1):
            raise ValueError(f"documents have {int(counts.sum())} sequences, there are {len(sizes)}")
        if ("modes" in self._open) != (modes is not None) or (modes is not None and len(modes) != len(sizes)):
            raise ValueError(f"{len(sizes)} sequences with modes {modes}: all have one, or none has")
        self._write_tokens(np.asarray(ids), sizes)
        if modes is not None:
            self._open["modes"].write(np.asarray(modes, dtype="<i1").tobytes())
        self._open["ends"].write((before + np.cumsum(counts)).astype("<i8").tobytes())
        self.documents += len(counts)

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
        if source.modes is not None:
            self._open["modes"].write(source.modes.tobytes())
        self._open["ends"].write((source.document_indices[1:] + self.sequences).astype("<i8").tobytes())
        self.sequences += len(source)
        self.documents += source.documents
        self.tokens += source.tokens

    def close(self) -> None:
        """Write the index, sync, and move both files to their names; without any sequence this is refused."""
        if self.sequences == 0:
            self.abort()
            raise refuse(f"output {self.prefix}", "there is nothing to write: no document", "input with text in it")
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
        for kind in self._open.keys() - {"bin"}:
            self._parts[kind].unlink()

    def _write_index(self, index: BinaryIO) -> None:
        index.write(HEADER.pack(MAGIC, 1, self._code, self.sequences, self.documents + 1))
        with self._parts["lengths"].open("rb") as lengths:
            shutil.copyfileobj(lengths, index, BLOCK)
        for block in pointers(_blocks(self._parts["lengths"]), self.dtype.itemsize):
            index.write(block.astype("<i8").tobytes())
        index.write(np.zeros(1, dtype="<i8").tobytes())
        for kind in [kind for kind in ("ends", "modes") if kind in self._open]:
            with self._parts[kind].open("rb") as stream:
                shutil.copyfileobj(stream, index, BLOCK)

    def abort(self) -> None:
        """Remove what was written; the target names stay as they were."""
        self.release()
        for path in self._parts.values():
            path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let go of the temporary files and leave them as they are."""
        for stream in self._open.values():
            stream.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _take(path: Path, prefix: str) -> BinaryIO:
    """The temporary file for writing, as it was left; refused while another process writes it."""
    path.touch()
    stream = path.open("r+b")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        case = "another process is writing it at this moment"
        raise refuse(f"output {prefix}", case, "another --output-prefix, or wait for the other process") from error
    return stream


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


@np.errstate(all="raise")
def merge(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Join pairs into one: byte for byte what preprocessing the joined inputs gives.

    Refused when their token types or the tokenizers that their notes name differ, or when the output is an input.
    """
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    notes = [read_info(prefix) for prefix in prefixes]
    _check_mergeable(sources, [note.get("tokenizer") for note in notes if note])
    if Path(output).absolute() in {Path(prefix).absolute() for prefix in prefixes}:
        raise refuse(f"merge into {output}", "the output is one of the inputs", "another --output-prefix")
    modal = sources[0].modes is not None
    with IndexedWriter(output, dtype=sources[0].dtype.newbyteorder("="), multimodal=modal) as writer:
        for source in sources:
            writer.extend(source)
    if notes[0] and all(notes):
        ends = all(note and note.get("append_eod") for note in notes)
        totals = {"documents": writer.documents, "tokens": writer.tokens, "append_eod": ends}
        write_info(output, notes[0] | totals)


def _check_mergeable(sources: Sequence[IndexedDataset], tokenizers: Sequence[object]) -> None:
    kinds = {(source.dtype.name, source.modes is not None) for source in sources}
    if len(kinds) == 1:
        if all(tokenizer == tokenizers[0] for tokenizer in tokenizers):
            return
        case = "their .info.json notes name different tokenizers"
    else:
        case = "only files whose ids are stored in one type, all with modes or all without, can be joined"
    listed = ", ".join(f"{source.prefix} ({source.dtype.name})" for source in sources) or "nothing"
    raise refuse(f"merge of {listed}", case, "files that were preprocessed with the same tokenizer")
