"""What a token file holds: counts, lengths, decoded beginnings of documents. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isotron.data.indexed import IndexedDataset, bin_path
from isotron.data.info import read_info
from isotron.tokenizers.base import Tokenizer

BLOCK = 1 << 22  # tokens that are looked at together
SHOWN_TOKENS = 48


@dataclass(frozen=True)
class Described:
    """documents, sequences, tokens; dtype of an id; bytes of the .bin; ids least and most; histogram of lengths.

    histogram: (from, to, documents) in powers of two, in tokens. samples: (document, first ids, their text or "").
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    size_bytes: int
    ids: tuple[int, int]
    lengths: dict[str, float]
    histogram: tuple[tuple[int, int, int], ...]
    samples: tuple[tuple[int, tuple[int, ...], str], ...]
    note: dict[str, Any] | None

    def lines(self) -> list[str]:
        """For the console."""
        sequences = "" if self.sequences == self.documents else f" in {self.sequences:,} sequences"
        out = [
            f"{self.prefix}: {self.documents:,} documents{sequences}, {self.tokens:,} tokens",
            f"  {self.dtype}, {self.size_bytes:,} bytes, ids {self.ids[0]} to {self.ids[1]}",
            "  tokens per document: " + ", ".join(f"{name} {value:,.6g}" for name, value in self.lengths.items()),
        ]
        if self.note is not None:
            made = self.note.get("tokenizer", {})
            ends = "with" if self.note.get("append_eod") else "without"
            out.append(f"  made with {made.get('type')}, {made.get('vocab_size')} entries, {ends} end-of-document ids")
        most = max((count for *_, count in self.histogram), default=1)
        for low, high, count in self.histogram:
            out.append(f"  {low:>10,} to {high:>10,}  {count:>12,}  {'#' * max(1, round(40 * count / most))}")
        for document, ids, text in self.samples:
            shown = repr(text) if text else " ".join(map(str, ids))
            out.append(f"  document {document}: {shown}")
        return out


def describe(prefix: str, tokenizer: Tokenizer | None = None, samples: int = 3) -> Described:
    """Read a whole pair (refused when it is damaged); `tokenizer` decodes the beginnings of `samples` documents."""
    data = IndexedDataset(prefix)
    data.check()
    sizes = _document_sizes(data)
    order = np.sort(sizes)
    quantiles = {"least": 0.0, "median": 0.5, "90%": 0.9, "most": 1.0}
    lengths = {name: float(order[round(at * (len(order) - 1))]) for name, at in quantiles.items() if len(order)}
    chosen = np.unique(np.linspace(0, len(sizes) - 1, samples).astype(int)).tolist() if len(sizes) and samples else []
    return Described(
        prefix,
        data.documents,
        len(data),
        data.tokens,
        data.dtype.name,
        bin_path(prefix).stat().st_size,
        _id_range(data),
        lengths | {"mean": float(sizes.mean()) if len(sizes) else 0.0},
        _histogram(sizes),
        tuple(_sample(data, document, tokenizer) for document in chosen),
        read_info(prefix),
    )


def _document_sizes(data: IndexedDataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    ends = np.concatenate(([0], np.cumsum(data.lengths, dtype=np.int64)))
    return np.diff(ends[data.document_indices])


def _id_range(data: IndexedDataset) -> tuple[int, int]:
    """The least and the most id, read block by block."""
    least, most = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    tokens: np.ndarray[Any, Any] = np.memmap(bin_path(data.prefix), dtype=data.dtype, mode="r")
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        least, most = min(least, int(block.min())), max(most, int(block.max()))
    return int(least), int(most)


def _histogram(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[tuple[int, int, int], ...]:
    """Documents by length in powers of two, without empty ranges at the ends."""
    classes = np.bincount([int(size).bit_length() for size in np.unique(sizes).tolist()], minlength=1)
    counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(len(classes), dtype=np.int64)
    values, numbers = np.unique(sizes, return_counts=True)
    np.add.at(counts, [int(value).bit_length() for value in values.tolist()], numbers)
    bounds = [(0, 0) if bits == 0 else (1 << (bits - 1), (1 << bits) - 1) for bits in range(len(counts))]
    filled = np.flatnonzero(counts)
    kept = range(int(filled[0]), int(filled[-1]) + 1) if len(filled) else range(0)
    return tuple((*bounds[bits], int(counts[bits])) for bits in kept)


def _sample(data: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> tuple[int, tuple[int, ...], str]:
    ids: list[int] = []
    for sequence in range(int(data.document_indices[document]), int(data.document_indices[document + 1])):
        ids += data.get(sequence, 0, min(SHOWN_TOKENS - len(ids), int(data.lengths[sequence]))).tolist()
        if len(ids) >= SHOWN_TOKENS:
            break
    fits = tokenizer is not None and all(0 <= i < tokenizer.vocab_size for i in ids)
    return document, tuple(ids), tokenizer.decode(ids) if tokenizer is not None and fits else ""
