"""From raw records to token ids: the part of preprocessing that runs in worker processes. PURE (and loads no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from isotron.core.errors import Refused
from isotron.data.parse import Bad, Unusable, read_texts
from isotron.data.records import Record, RecordBatch
from isotron.data.sentences import split_sentences
from isotron.tokenizers.base import Tokenizer

Int64s: TypeAlias = npt.NDArray[np.int64]


class Column(NamedTuple):
    """The documents of one key: all ids in a row, the length of each sequence, the sequences of each document."""

    ids: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """One batch of `records`: a column for each key; what was left out or cut.

    `place`: (file, batch of it, bytes read so far).
    """

    columns: tuple[Column, ...]
    empty: int
    truncated: int
    bad: tuple[Bad, ...]
    records: int
    place: tuple[int, int, int]


@dataclass(frozen=True)
class Encoder:
    """How records become ids.

    keys: the fields to take. append_eod: each document ends with the end-of-document id. sentences: a document is a
    sequence for each of its sentences. keep_newlines, language: see `split_sentences`. most: documents are cut behind
    so many tokens (0: never); the end-of-document id comes on top.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    sentences: bool = False
    keep_newlines: bool = False
    language: str = "english"
    most: int = 0

    @np.errstate(all="raise")  # a number that does not fit ends the job, also as a mere warning
    def __call__(self, batch: RecordBatch) -> Encoded:
        """The documents of a batch, in order. A text without anything but white space is empty and left out."""
        rows: list[list[str]] = []
        places: list[Record] = []
        bad: list[Bad] = []
        for record in batch.records:
            try:
                rows.append(read_texts(record, self.keys))
                places.append(record)
            except Unusable as error:
                bad.append(Bad(batch.path, record.line, error.offset, error.why, error.keys))
        try:
            encoded = [self._column([row[k] for row in rows]) for k in range(len(self.keys))]
        except Refused:  # some text has no ids (null tokenizer): find it
            rows, late = self._without_refused(rows, places, batch.path)
            bad = sorted([*bad, *late], key=lambda b: (b.line, b.offset))
            encoded = [self._column([row[k] for row in rows]) for k in range(len(self.keys))]
        empty = sum(len(rows) - len(column.sequences) for column, _ in encoded)
        cut = sum(count for _, count in encoded)
        place = (batch.file, batch.number, batch.position)
        return Encoded(tuple(column for column, _ in encoded), empty, cut, tuple(bad), len(batch.records), place)

    def _without_refused(self, rows: list[list[str]], places: list[Record], path: str) -> tuple[list[Any], list[Bad]]:
        """The rows whose texts the tokenizer takes, and the others as bad records."""
        kept, bad = [], []
        for row, place in zip(rows, places, strict=True):
            try:
                self._column(row)
                kept.append(row)
            except Refused as refused:
                bad.append(Bad(path, place.line, place.offset, refused.problems[0].case))
        return kept, bad

    def _column(self, texts: Sequence[str]) -> tuple[Column, int]:
        """The texts that are not empty as ids, and how many of them were cut."""
        filled = [text for text in texts if text and not text.isspace()]
        if self.sentences:
            pieces = [split_sentences(text, self.keep_newlines, self.language) for text in filled]
            ids, lengths = self.tokenizer.encode_flat([piece for document in pieces for piece in document])
            sequences = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        else:
            ids, lengths = self.tokenizer.encode_flat(filled)
            sequences = np.ones(len(filled), dtype=np.int64)
        if not lengths.all():  # text of which nothing is left, such as white space that a normalizer drops
            lengths, sequences = _without_empty(lengths, sequences)
        cut = 0
        if self.most:
            ids, lengths, sequences, cut = _shortened(ids, lengths, sequences, self.most)
        if self.append_eod:
            ids, lengths = _ended(ids, lengths, sequences, self.tokenizer.eod)
        return Column(ids, lengths, sequences), cut


def _without_empty(lengths: Int64s, sequences: Int64s) -> tuple[Int64s, Int64s]:
    """The lengths without zeros, and how many sequences each document has then; documents without any go."""
    owner: Int64s = np.repeat(np.arange(len(sequences)), sequences)
    left = np.bincount(owner[lengths > 0], minlength=len(sequences))
    return lengths[lengths > 0], left[left > 0]


def _shortened(
    ids: npt.NDArray[np.integer], lengths: Int64s, sequences: Int64s, most: int
) -> tuple[npt.NDArray[np.integer], Int64s, Int64s, int]:
    """Every document cut behind `most` ids, and how many were longer."""
    owner: Int64s = np.repeat(np.arange(len(sequences)), sequences)
    sizes = np.bincount(owner, weights=lengths, minlength=len(sequences)).astype(np.int64)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = place < most
    new = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[kept], minlength=len(lengths))
    lengths, sequences = _without_empty(new, sequences)
    return ids[kept], lengths, sequences, int(np.count_nonzero(sizes > most))


def _ended(
    ids: npt.NDArray[np.integer], lengths: Int64s, sequences: Int64s, eod: int
) -> tuple[npt.NDArray[np.integer], Int64s]:
    """The ids with `eod` behind every document, as part of its last sequence."""
    last = np.cumsum(sequences) - 1
    ends = np.cumsum(lengths)[last]
    longer = lengths.copy()
    longer[last] += 1
    return np.insert(ids, ends, eod), longer
