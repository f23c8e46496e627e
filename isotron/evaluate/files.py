"""Readers of the official files of the tasks, from local paths. PURE.

A place where a file does not say what it should is refused with its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from isotron.core.errors import Refused, refuse


def existing(task: str, path: str) -> Path:
    """The path, refused where there is nothing."""
    found = Path(path).expanduser()
    if not found.exists():
        raise refuse(f"--task {task}={path}", "there is no such file or directory", f"--task {task}=PATH of local data")
    return found


def a_file(task: str, path: Path) -> Path:
    """The path, refused where it is a directory."""
    if path.is_dir():
        raise _wrong(task, path, 0, "it is a directory, and this task reads one file", f"the official file of {task}")
    return path


def text_of(task: str, path: Path) -> str:
    """A file of plain text."""
    try:
        text = a_file(task, path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(task, path, 0, f"it is not UTF-8: {error}", "a text file") from error
    if not text.strip():
        raise _wrong(task, path, 0, "it holds no text", "a file with text")
    return text


def json_lines(task: str, path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; blank lines are left out."""
    for number, line in _lines(task, path):
        if line.strip():
            try:
                found = json.loads(line)
            except ValueError as error:
                raise _wrong(task, path, number, f"it is not JSON: {error}", "one JSON object a line") from error
            if not isinstance(found, dict):
                raise _wrong(task, path, number, "it is not a JSON object", 'lines such as {"text": "..."}')
            yield found


def texts(task: str, path: Path, key: str) -> Iterator[str]:
    """The text under `key` of every line."""
    for number, found in enumerate(json_lines(task, path), 1):
        text = found.get(key)
        if not isinstance(text, str):
            raise _wrong(task, path, number, f"it has no text under the key {key}", "--json-keys with the right key")
        yield text


def table_rows(task: str, path: Path, columns: int) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of a tab-separated file behind its head line; cells are stripped, quotes mean nothing."""
    for number, line in _lines(task, path):
        cells = [cell.strip() for cell in line.rstrip("\n").split("\t")]
        if number == 1 or not line.strip():
            continue
        if len(cells) < columns:
            case = f"it has {len(cells)} columns, and {columns} are needed"
            raise _wrong(task, path, number, case, f"the official file of {task}")
        yield number, cells


def _lines(task: str, path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of a file in UTF-8."""
    number = 0
    with a_file(task, path).open(encoding="utf-8") as stream:
        try:
            for number, line in enumerate(stream, 1):
                yield number, line
        except UnicodeDecodeError as error:
            raise _wrong(task, path, number + 1, f"it is not UTF-8: {error.reason}", "a text file") from error


def passages(task: str, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """RACE's files, one JSON object or several lines of them, in the order of their names."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise _wrong(task, path, 0, "it holds no .txt file", "a directory such as RACE/test/high")
    for file in files:
        for number, found in enumerate(json_lines(task, file), 1):
            lists = [found.get(name) for name in ("questions", "options", "answers")]
            sizes = {len(x) if isinstance(x, list) else -1 for x in lists}
            if not isinstance(found.get("article"), str) or len(sizes) != 1 or -1 in sizes:
                case = "it lacks article, questions, options or answers, or they are not equally many"
                raise _wrong(task, file, number, case, "the official files of RACE")
            yield file, found


def label(task: str, path: Path, line: int, text: str, known: Sequence[str]) -> int:
    """The number of a label; refused where the file names none, as hidden test sets do not."""
    if text not in known:
        case = f"its label is {text!r}, and the labels are {', '.join(known)}"
        raise _wrong(task, path, line, case, "a set with labels, such as the dev set")
    return list(known).index(text)


def _wrong(task: str, path: Path, line: int, case: str, fix: str) -> Refused:
    where = f"{path}:{line}" if line else str(path)
    return refuse(f"--task {task}={where}", case, fix)
