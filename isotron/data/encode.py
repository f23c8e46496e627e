"""From raw records to token ids: the part of preprocessing that runs in worker processes. PURE (and loads no torch)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from isotron.core.errors import Refused
from isotron.data.records import Record, RecordBatch
from isotron.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used: where it is, and why. `keys`: what it has instead of the key that it lacks."""

    path: str
    line: int
    offset: int
    why: str
    keys: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """`file:line (byte N)`"""
        return f"{self.path}:{self.line} (byte {self.offset})"


@dataclass(frozen=True)
class Encoded:
    """One batch: for each key the ids of its documents in a row (int64) and their lengths; what was left out."""

    columns: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]
    empty: int
    bad: tuple[Bad, ...]
    position: int


@dataclass(frozen=True)
class Encoder:
    """How records become ids: their fields `keys`, and whether each document ends with the end-of-document id."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool

    def __call__(self, batch: RecordBatch) -> Encoded:
        """The documents of a batch, in order. A text without anything but white space is empty and left out."""
        rows: list[list[str]] = []
        places: list[Record] = []
        bad: list[Bad] = []
        for record in batch.records:
            try:
                rows.append(self._texts(record))
                places.append(record)
            except _Unusable as error:
                bad.append(Bad(batch.path, record.line, error.offset, error.why, error.keys))
        try:
            encoded = [self._encode(row[k] for row in rows) for k in range(len(self.keys))]
        except Refused:  # some text has no ids (null tokenizer): find it
            rows, late = self._without_refused(rows, places, batch.path)
            bad = sorted([*bad, *late], key=lambda b: b.line)
            encoded = [self._encode(row[k] for row in rows) for k in range(len(self.keys))]
        columns = tuple(self._column(documents) for documents in encoded)
        empty = sum(not ids for documents in encoded for ids in documents)
        return Encoded(columns, empty, tuple(bad), batch.position)

    def _texts(self, record: Record) -> list[str]:
        """The text of every key of one record."""
        if record.problem:
            raise _Unusable(record.problem, record.offset)
        try:
            text = record.raw.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = record.raw[error.start]
            raise _Unusable(f"byte 0x{byte:02X} is not UTF-8", record.offset + error.start) from error
        try:
            values = json.loads(text)
        except RecursionError as error:
            raise _Unusable("the JSON is nested too deeply", record.offset) from error
        except json.JSONDecodeError as error:
            at = record.offset + len(text[: error.pos].encode("utf-8"))
            what = error.msg.removesuffix(" at").removesuffix(" starting")
            raise _Unusable(f"bad JSON: {what}", at) from error
        return [self._text(values, key, record) for key in self.keys]

    def _text(self, values: Any, key: str, record: Record) -> str:
        if not isinstance(values, dict):
            raise _Unusable(f"a record is a JSON object, this is a {type(values).__name__}", record.offset)
        if key not in values:
            listed = ", ".join(map(repr, list(values)[:8])) or "none"
            texts = {k: v for k, v in values.items() if isinstance(v, str)}
            longest = sorted(texts, key=lambda k: -len(texts[k]))
            raise _Unusable(f"the record has no key {key!r}; its keys: {listed}", record.offset, tuple(longest))
        value = values[key]
        if not isinstance(value, str):
            raise _Unusable(f"the value of {key!r} is a {type(value).__name__}, not a text", record.offset)
        if b"\\ud" in record.raw or b"\\uD" in record.raw:
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise _Unusable(f"the value of {key!r} has half a surrogate pair", record.offset) from error
        return value

    def _encode(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of every text; none for an empty one."""
        listed = list(texts)
        filled = [text for text in listed if text and not text.isspace()]
        ids = iter(self.tokenizer.encode_batch(filled))
        return [next(ids) if text and not text.isspace() else [] for text in listed]

    def _without_refused(self, rows: list[list[str]], places: list[Record], path: str) -> tuple[list[Any], list[Bad]]:
        """The rows whose texts the tokenizer takes, and the others as bad records."""
        kept, bad = [], []
        for row, place in zip(rows, places, strict=True):
            try:
                self._encode(row)
                kept.append(row)
            except Refused as refused:
                bad.append(Bad(path, place.line, place.offset, refused.problems[0].case))
        return kept, bad

    def _column(self, documents: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The documents that are not empty as one row of ids and their lengths."""
        end = [self.tokenizer.eod] if self.append_eod else []
        full = [ids for ids in documents if ids]
        flat = np.fromiter(chain.from_iterable(chain(ids, end) for ids in full), dtype=np.int64)
        return flat, np.fromiter((len(ids) + len(end) for ids in full), dtype=np.int64)


class _Unusable(Exception):
    """Why a record cannot be used, the byte offset to look at, and keys of it that hold text, the longest first."""

    def __init__(self, why: str, offset: int, keys: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.why, self.offset, self.keys = why, offset, keys
