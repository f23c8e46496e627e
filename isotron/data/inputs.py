"""Which files an `--input` names, and how each is opened: plain, .gz, .zst, or as a table. PURE."""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from isotron.core.errors import Refused, refuse
from isotron.tokenizers.base import need_library

ENDINGS = (".jsonl", ".json", ".ndjson")
TABLES = (".parquet", ".arrow")
PACKED = (".gz", ".zst")
STATE = "state.json"  # of a directory that `datasets` has saved: names its Arrow files in order


class BadStream(Exception):
    """A compressed file that cannot be read on."""


DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, BadStream)


def expand(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that the inputs (paths, glob patterns, directories of `datasets`) name, each pattern's files sorted."""
    paths: list[Path] = []
    for given in map(str, inputs):
        saved = _saved_dataset(Path(given)) if Path(given).is_dir() else None
        found = [given] if Path(given).is_file() else saved or sorted(glob.glob(given, recursive=True))
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


def _saved_dataset(directory: Path) -> list[str] | None:
    """The Arrow or Parquet files of a directory written by `datasets`; None when it is no such directory."""
    state = directory / STATE
    if state.is_file():
        try:
            listed = [str(directory / entry["filename"]) for entry in json.loads(state.read_text())["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            case = f"its {STATE} lists no files: {type(error).__name__} {error}"
            raise refuse(f"--input {directory}", case, "the directory as `datasets` saved it") from error
        missing = [name for name in listed if not Path(name).is_file()]
        if missing or not listed:
            case = f"its {STATE} names {missing[0]}, which is not there" if missing else f"its {STATE} names no file"
            raise refuse(f"--input {directory}", case, "the directory as `datasets` saved it, complete")
        return listed
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in directory.glob(f"*/{STATE}"))
        case = f"it holds several parts: {', '.join(splits)}"
        raise refuse(f"--input {directory}", case, f"--input {directory / splits[0] if splits else directory}")
    return sorted(map(str, directory.rglob("*.parquet"))) or None


def _check_file(path: Path) -> None:
    name = path.name.removesuffix(compression(path))
    if not name.endswith((*ENDINGS, *TABLES)):
        ends = ", ".join((*ENDINGS, *TABLES))
        code = 'import json, sys; print(json.dumps({"text": sys.stdin.read()}))'
        out = f"{path.name.split('.')[0]}.jsonl"
        fix = f"python3 -c '{code}' < {path} > {out} for plain text; {out} as its name if it is JSON lines already"
        raise refuse(f"--input {path}", f"inputs end in {ends}, JSON also in {' or '.join(PACKED)} behind that", fix)
    if path.stat().st_size == 0:
        raise refuse(f"--input {path}", f"the file is empty: {path.absolute()}", "--input with a complete file")
    if compression(path) == ".zst":
        need_library("zstandard", f"--input {path}")


def compression(path: Path) -> str:
    """.gz, .zst or nothing."""
    return path.suffix if path.suffix in PACKED else ""


def is_table(path: Path) -> bool:
    """Whether the file is read by columns."""
    return path.suffix in TABLES


def opened(path: Path, raw: IO[bytes]) -> io.BufferedReader:
    """The decompressed bytes of an open file."""
    if compression(path) == ".gz":
        return cast(io.BufferedReader, gzip.GzipFile(fileobj=raw))
    if compression(path) == ".zst":
        return io.BufferedReader(_ZstBytes(raw), 1 << 17)
    return cast(io.BufferedReader, raw)


def damaged(path: Path, error: Exception) -> Refused:
    """The refusal of a compressed file that breaks off or is none."""
    fix = f"a complete {compression(path)} file"
    return refuse(f"--input {path}", f"the compressed file is damaged: {error}", fix)


class _ZstBytes(io.RawIOBase):
    """The frames of a .zst file one after the other; a file that ends within a frame is an error."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._library = need_library("zstandard", ".zst input")
        self._raw, self._open = raw, None
        self._ready, self._left = memoryview(b""), b""

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target` with the next bytes; 0 at the end."""
        while not self._ready:
            chunk = self._left or self._raw.read(1 << 16)
            self._left = b""
            if not chunk:
                if self._open is not None:
                    raise BadStream("it ends within a frame")
                return 0
            self._decompress(chunk)
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, chunk: bytes) -> None:
        if self._open is None:
            self._open = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        current: Any = self._open
        try:
            self._ready = memoryview(current.decompress(chunk))
        except self._library.ZstdError as error:
            raise BadStream(str(error)) from error
        if current.eof:
            self._left, self._open = current.unused_data, None
