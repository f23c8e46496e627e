"""What a record holds: its JSON values, its texts, or why it cannot be used. PURE."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotron.core.errors import Refused, refuse
from isotron.data.records import Record, line_of


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
        """`file:line (byte N)`, or `file, row N` in a table."""
        if self.offset < 0:
            return f"{self.path}, row {self.line}"
        return f"{self.path}:{self.line or line_of(self.path, self.offset)} (byte {self.offset})"


class Unusable(Exception):
    """Why a record cannot be used, the byte offset to look at, and keys of it that hold text, the longest first."""

    def __init__(self, why: str, offset: int, keys: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.why, self.offset, self.keys = why, offset, keys


def read_texts(record: Record, keys: Sequence[str]) -> list[str]:
    """The text of every key of one record; raises Unusable."""
    values = read_values(record)
    return [_text(values, key, record) for key in keys]


def read_values(record: Record) -> Any:
    """The JSON value or the table row of a record; raises Unusable."""
    if record.problem:
        raise Unusable(record.problem, record.offset)
    if record.values is not None:
        return record.values
    try:
        text = record.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = record.raw[error.start]
        raise Unusable(f"byte 0x{byte:02X} is not UTF-8", record.offset + error.start) from error
    try:
        return json.loads(text)
    except RecursionError as error:
        raise Unusable("the JSON is nested too deeply", record.offset) from error
    except json.JSONDecodeError as error:
        at = record.offset + len(text[: error.pos].encode("utf-8"))
        what = error.msg.removesuffix(" at").removesuffix(" starting")
        raise Unusable(f"bad JSON: {what}", at) from error
    except ValueError as error:  # a number of more digits than Python reads
        raise Unusable(f"bad JSON: {error}", record.offset) from error


def _text(values: Any, key: str, record: Record) -> str:
    if not isinstance(values, Mapping):
        raise Unusable(f"a record is a JSON object, this is a {type(values).__name__}", record.offset)
    if key not in values:
        listed = ", ".join(map(repr, list(values)[:8])) or "none"
        texts = {k: v for k, v in values.items() if isinstance(v, str)}
        longest = sorted(texts, key=lambda k: -len(texts[k]))
        raise Unusable(f"the record has no key {key!r}; its keys: {listed}", record.offset, tuple(longest))
    value = values[key]
    if not isinstance(value, str):
        raise Unusable(f"the value of {key!r} is a {type(value).__name__}, not a text", record.offset)
    if b"\\ud" in record.raw or b"\\uD" in record.raw:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Unusable(f"the value of {key!r} has half a surrogate pair", record.offset) from error
    return value


def refuse_bad(path: str, record: Record, error: Unusable) -> Refused:
    """The refusal of a record, with its place."""
    bad = Bad(path, record.line, error.offset, error.why, error.keys)
    fix = f"--json-keys {error.keys[0]}" if error.keys else "correct this record"
    return refuse(f"--input {bad.where}", error.why, fix, exit_code=1)


def texts_of(path: str, record: Record, keys: Sequence[str]) -> list[str]:
    """The text of every key of one record, refused with its place where it has none."""
    try:
        return read_texts(record, keys)
    except Unusable as error:
        raise refuse_bad(path, record, error) from error
