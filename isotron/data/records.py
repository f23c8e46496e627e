"""Reading a text corpus record by record, never a whole file in memory. PURE.

JSONL or one JSON array, plain, .gz or .zst; Parquet and Arrow tables (`columns`). JSON records stay raw bytes here,
each with its place, so that parsing them can happen in worker processes. Offsets and lines count in the decompressed
text. A reader may take one share of the input: which records it holds follows from byte positions alone, so shares can
be read on different machines and joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, NamedTuple

from isotron.data.columns import rows
from isotron.data.inputs import DAMAGE, compression, damaged, is_table, opened

BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)


class Record(NamedTuple):
    """One document as it stands in a file; `problem` says what is wrong with its place, if anything.

    A row of a table has `values` instead of raw bytes; its line is its number, counted from 1, its offset -1.
    """

    line: int
    offset: int
    raw: bytes
    problem: str = ""
    values: Mapping[str, object] | None = None


@dataclass(frozen=True)
class RecordBatch:
    """Records of one file, in order; `position` is how many bytes of all inputs on disk are read so far.

    file, number: which file of the inputs, and which batch of that file; a resumed job goes on behind them.
    """

    path: str
    records: tuple[Record, ...]
    position: int
    file: int = 0
    number: int = 0


@dataclass(frozen=True)
class Share:
    """Part `index` of `count` equal parts of the bytes of all inputs.

    A line belongs to the part in which it begins; a file that cannot be cut (compressed, an array, a table) belongs
    whole to the part in which it begins.
    """

    index: int = 0
    count: int = 1

    def bounds(self, total: int) -> tuple[int, int]:
        """First byte, and first byte of the next part."""
        return total * self.index // self.count, total * (self.index + 1) // self.count


WHOLE = Share()


def read_batches(
    paths: Sequence[Path],
    max_bytes: int = 1 << 18,
    max_records: int = 1024,
    *,
    columns: Sequence[str] = (),
    share: Share = WHOLE,
    after: tuple[int, int] = (0, 0),
) -> Iterator[RecordBatch]:
    """All records in batches of at most `max_records`, closed once they hold `max_bytes`.

    columns: of tables, what to read. after: (file, batches of it) that are done and left out.
    """
    sizes = [path.stat().st_size for path in paths]
    first, stop = share.bounds(sum(sizes))
    begin = 0
    for file, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        low, high = max(first - begin, 0), min(stop - begin, size)
        if file >= after[0] and low < high and (low == 0 or is_cuttable(path)):
            batches = _file_batches(path, max_bytes, max_records, columns, (low, high))
            done = after[1] if file == after[0] else 0
            for number, (records, at) in enumerate(batches):
                if number >= done:
                    yield RecordBatch(str(path), records, begin + at - first, file, number)
        begin += size


def _file_batches(
    path: Path, max_bytes: int, max_records: int, columns: Sequence[str], part: tuple[int, int]
) -> Iterator[tuple[tuple[Record, ...], int]]:
    """(records, bytes of the file read) of one file, or of the lines that begin in `part` of it."""
    with path.open("rb") as raw:
        batch: list[Record] = []
        size = 0
        for record in _records(path, raw, columns, part):
            batch.append(record)
            size += len(record.raw) or sum(len(v) for v in (record.values or {}).values() if isinstance(v, str))
            if size >= max_bytes or len(batch) >= max_records:
                yield tuple(batch), raw.tell()
                batch, size = [], 0
        if batch:
            yield tuple(batch), part[1]


def is_cuttable(path: Path) -> bool:
    """Whether a part of the file can be read by itself: lines that are not compressed."""
    if is_table(path) or compression(path):
        return False
    with path.open("rb") as stream:
        return not _is_array(stream.read(1 << 16))


def _is_array(start: bytes) -> bool:
    return start.removeprefix(BOM).lstrip().startswith(b"[")


def _records(path: Path, raw: IO[bytes], columns: Sequence[str], part: tuple[int, int]) -> Iterator[Record]:
    """The records of one open file; a damaged one is refused with its name."""
    if is_table(path):
        for number, values in enumerate(rows(path, columns), start=1):
            yield Record(number, -1, b"", "", values)
        return
    stream = opened(path, raw)
    try:
        start = stream.peek(1 << 16)
        if _is_array(start):
            begin = len(BOM) if start.startswith(BOM) else 0
            stream.read(begin)
            yield from _array_elements(stream, begin)
        else:
            yield from _part_of_lines(stream, part, None if compression(path) else part[1])
    except DAMAGE as error:
        raise damaged(path, error) from error


def _part_of_lines(stream: BufferedReader, part: tuple[int, int], stop: int | None) -> Iterator[Record]:
    """The lines that begin in the part; line numbers are 0 (not known) unless it begins with the file."""
    first = part[0]
    if first:
        stream.seek(first - 1)  # the byte before tells whether a line begins here
        first += len(stream.readline()) - 1
    elif stream.peek(len(BOM)).startswith(BOM):
        first = len(stream.read(len(BOM)))
    for record in _lines(stream, first):
        if stop is not None and record.offset >= stop and (part[0] or record.line > 1):  # a byte-order mark is no line
            return
        yield record._replace(line=0) if part[0] else record


def _lines(stream: Iterable[bytes], offset: int) -> Iterator[Record]:
    """One record per line; blank lines are no records."""
    for number, line in enumerate(stream, start=1):
        if not line.isspace():
            yield Record(number, offset, line.rstrip(b"\r\n"))
        offset += len(line)


def line_of(path: str | Path, offset: int) -> int:
    """The number of the line that holds byte `offset` of an uncompressed file."""
    number = 1
    with Path(path).open("rb") as stream:
        while offset > 0 and (chunk := stream.read(min(offset, 1 << 20))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


class _ArrayScanner:
    """Finds the elements of one JSON array in chunks. Only quotes, brackets and commas count; parsing comes later."""

    def __init__(self, offset: int) -> None:
        self.buffer, self.base = b"", offset  # `base`: offset of buffer[0] in the file
        self.start = self.at = self.counted = 0  # in the buffer: current element, next byte to scan, lines counted
        self.line, self.depth, self.closed = 1, 0, b""

    def feed(self, chunk: bytes) -> None:
        """Append a chunk and drop the elements that are done."""
        self.line += self.buffer.count(b"\n", self.counted, self.start)
        self.buffer = self.buffer[self.start :] + chunk
        self.base += self.start
        self.at -= self.start
        self.start = self.counted = 0

    def element(self, stop: int, problem: str = "") -> Record:
        """The current element up to buffer[stop], placed at its first byte that is not white space."""
        raw = self.buffer[self.start : stop]
        body = raw.lstrip()
        first = self.start + len(raw) - len(body)
        self.line += self.buffer.count(b"\n", self.counted, first)
        self.counted = first
        return Record(self.line, self.base + first, body.rstrip(), problem)

    def scan(self) -> Iterator[Record]:
        """The elements that end in the buffer; stops behind the closing bracket, which is then in `closed`."""
        for token in _TOKEN.finditer(self.buffer, self.at):
            mark = token.group()
            if mark == b'"':  # a string that goes on in the next chunk
                self.at = token.start()
                return
            self.at = token.end()
            if mark in b"[{":
                self.depth += 1
                self.start = self.at if self.depth == 1 else self.start
            elif mark == b"," and self.depth == 1:
                yield self.element(token.start())
                self.start = self.counted = self._count(self.at)
            elif mark in b"]}":
                self.depth -= 1
                if self.depth == 0:
                    if self.buffer[self.start : token.start()].strip():  # `[1, 2, ]` has two elements
                        yield self.element(token.start())
                    self.start, self.closed = self.at, mark
                    return
        self.at = len(self.buffer)

    def _count(self, position: int) -> int:
        self.line += self.buffer.count(b"\n", self.counted, position)
        return position


def _array_elements(stream: IO[bytes], offset: int) -> Iterator[Record]:
    """The elements of the one JSON array that a file holds."""
    scanner = _ArrayScanner(offset)
    # twice as much each time an element does not fit: nothing is scanned more than twice
    while not scanner.closed and (chunk := stream.read(max(1 << 20, len(scanner.buffer) - scanner.start))):
        scanner.feed(chunk)
        yield from scanner.scan()
    if not scanner.closed:
        yield scanner.element(len(scanner.buffer), "the file ends inside its JSON array")
        return
    scanner.feed(stream.read(1 << 16))
    if scanner.closed != b"]":
        yield scanner.element(0, "the JSON array ends with } instead of ]")
    elif scanner.buffer.strip():
        yield scanner.element(len(scanner.buffer), "there is more text after the end of the JSON array")
