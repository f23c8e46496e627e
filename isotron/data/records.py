"""Reading a text corpus record by record: JSONL or one JSON array, plain or .gz, never a whole file in memory. PURE.

Records stay raw bytes here, each with its place, so that parsing them can happen in worker processes. Offsets and
lines count in the decompressed text.
"""

from __future__ import annotations

import glob
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, NamedTuple, cast

from isotron.core.errors import refuse

ENDINGS = (".jsonl", ".json", ".ndjson")
BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)


class Record(NamedTuple):
    """One document as it stands in a file; `problem` says what is wrong with its place, if anything."""

    line: int
    offset: int
    raw: bytes
    problem: str = ""


@dataclass(frozen=True)
class RecordBatch:
    """Records of one file, in order; `position` is how many bytes of all inputs on disk are read so far."""

    path: str
    records: tuple[Record, ...]
    position: int


def expand(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that the inputs (paths and glob patterns) name, each pattern's files sorted."""
    paths: list[Path] = []
    for given in map(str, inputs):
        found = [given] if Path(given).is_file() else sorted(glob.glob(given, recursive=True))
        files = [Path(name) for name in found if Path(name).is_file()]
        if not files:
            kind = "it is a directory" if Path(given).is_dir() else f"there is no such file: {Path(given).absolute()}"
            raise refuse(f"--input {given}", kind, f"--input with files, or a pattern such as '{given}/*.jsonl'")
        paths += files
    if not paths:
        raise refuse("no --input", "there is nothing to preprocess", "--input corpus.jsonl")
    for path in paths:
        _check_file(path)
    return paths


def _check_file(path: Path) -> None:
    name = path.name[:-3] if path.name.endswith(".gz") else path.name
    if not name.endswith(ENDINGS):
        ends = ", ".join(ENDINGS)
        code = 'import json, sys; print(json.dumps({"text": sys.stdin.read()}))'
        out = f"{path.name.split('.')[0]}.jsonl"
        fix = f"python3 -c '{code}' < {path} > {out} for plain text; {out} as its name if it is JSON lines already"
        raise refuse(f"--input {path}", f"inputs end in {ends}, or one of them and .gz", fix)
    if path.stat().st_size == 0:
        raise refuse(f"--input {path}", f"the file is empty: {path.absolute()}", "--input with a complete file")


def read_batches(paths: Sequence[Path], max_bytes: int = 1 << 18, max_records: int = 1024) -> Iterator[RecordBatch]:
    """All records in batches of at most `max_records`, closed once they hold `max_bytes`."""
    done = 0
    for path in paths:
        with path.open("rb") as raw:
            batch: list[Record] = []
            size = 0
            for record in _records(path, raw):
                batch.append(record)
                size += len(record.raw)
                if size >= max_bytes or len(batch) >= max_records:
                    yield RecordBatch(str(path), tuple(batch), done + raw.tell())
                    batch, size = [], 0
            done += path.stat().st_size
            if batch:
                yield RecordBatch(str(path), tuple(batch), done)


def _records(path: Path, raw: IO[bytes]) -> Iterator[Record]:
    """The records of one open file; a damaged .gz is refused with the file's name."""
    zipped = path.name.endswith(".gz")
    stream = cast(BufferedReader, gzip.GzipFile(fileobj=raw) if zipped else raw)
    try:
        start = stream.peek(1 << 16)
        begin = len(BOM) if start.startswith(BOM) else 0
        stream.read(begin)
        is_array = start[begin:].lstrip().startswith(b"[")
        yield from _array_elements(stream, begin) if is_array else _lines(stream, begin)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise refuse(f"--input {path}", f"the compressed file is damaged: {error}", "a complete .gz file") from error


def _lines(stream: Iterable[bytes], offset: int) -> Iterator[Record]:
    """One record per line; blank lines are no records."""
    for number, line in enumerate(stream, start=1):
        if not line.isspace():
            yield Record(number, offset, line.rstrip(b"\r\n"))
        offset += len(line)


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
