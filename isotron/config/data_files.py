"""Megatron's files of data paths, read when their option is: `--data-args-path`, `--per-split-data-args-path`. PURE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isotron.core.errors import Problem


def _read(flag: str, name: str, wanted: str) -> str | Problem:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Problem(f"{flag} {name}", f"the file cannot be read: {error}", f"{flag} with {wanted}")


def one_blend(flag: str, words: list[str]) -> dict[str, Any] | Problem:
    """A text file whose words are those of --data-path."""
    wanted = "a file that holds PREFIX or 0.7 PREFIX 0.3 PREFIX"
    text = _read(flag, words[0], wanted)
    if isinstance(text, Problem):
        return text
    if not text.split():
        return Problem(f"{flag} {words[0]}", "the file holds no word", f"{flag} with {wanted}")
    return {"data_path": tuple(text.split())}


def each_split(flag: str, words: list[str]) -> dict[str, Any] | Problem:
    """A JSON object: lists of the words of --data-path under train and valid; test is not read."""
    wanted = 'a file that holds {"train": ["0.7", "PREFIX", ..], "valid": ["PREFIX"]}'
    text = _read(flag, words[0], wanted)
    if isinstance(text, Problem):
        return text
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Problem(f"{flag} {words[0]}", f"it is no JSON: {error}", f"{flag} with {wanted}")
    lists: list[Any] = [table.get(key) or [] for key in ("train", "valid")] if isinstance(table, dict) else [0]
    if not all(isinstance(part, list) and all(isinstance(w, str | int | float) for w in part) for part in lists):
        return Problem(f"{flag} {words[0]}", "train and valid are lists of words", f"{flag} with {wanted}")
    if not lists[0]:
        return Problem(f"{flag} {words[0]}", "it names no data under train", f"{flag} with {wanted}")
    train, valid = (tuple(map(str, part)) for part in lists)
    return {"data_path": train, **({"valid_data_path": valid} if valid else {"@train_data": True})}


FILES: dict[str, Callable[[str, list[str]], dict[str, Any] | str | Problem]] = {
    "--data-args-path": one_blend,
    "--per-split-data-args-path": each_split,
}
