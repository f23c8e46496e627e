"""What every tokenizer offers, and how one is stored beside a checkpoint. PURE: the libraries load on first use.

`save` copies the tokenizer's own files and writes `isotron_tokenizer.json`; `build.load_tokenizer` reads that
directory back and refuses it when the ids that matter (vocabulary size, end of document, ...) came out different.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse
from isotron.tokenizers.config import DESCRIPTOR

END_OF_TEXT = "<|endoftext|>"
Flat: TypeAlias = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]


class Tokenizer(Protocol):
    """Text <-> ids. `vocab_size` counts the real entries (largest id + 1), without any padding for the model.

    `eod` ends a document; `bos`, `eos` and `pad` are None where the tokenizer names none. `notes` are lines that a user
    should see. `encode` never adds special
    tokens by itself; `prefix` are those that the tokenizer's own library would put before a text.
    """

    vocab_size: int
    eod: int
    bos: int | None
    eos: int | None
    pad: int | None
    prefix: tuple[int, ...]
    notes: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text; equal to `encode` of each, faster where the library offers it."""

    def encode_flat(self, texts: list[str]) -> Flat:
        """The ids of all texts in a row, and how many each has: what `encode_batch` gives, without its lists."""

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens included as the library spells them."""

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's files and its descriptor into `directory`."""

    def describe(self) -> dict[str, Any]:
        """The descriptor: type, file names with their hashes, and the ids of the special tokens."""


def other_files(stored: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """How a tokenizer differs from one that a descriptor was written of; empty where its files are the same, or where
    the descriptor does not know them.
    """
    now, then = tokenizer.describe(), stored.get("sha256")
    if not isinstance(then, dict) or sorted(then.values()) == sorted(now["sha256"].values()):
        return ""
    before, after = (f"{', '.join(sorted(d['sha256']))} of {d.get('vocab_size')} entries" for d in (stored, now))
    return f"{before} then, {after} of other content now; the same ids may mean other text"


class FileTokenizer(ABC):
    """The part all tokenizers share: their files, saving, and the way to a worker process.

    `files` maps option names to paths; `extras` are further files that belong in a copy. A subclass sets the ids.
    """

    type_name = ""
    vocab_size: int
    eod: int
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    sep: int | None = None
    cls: int | None = None
    mask: int | None = None
    extra_ids: tuple[int, ...] = ()  # of <extra_id_0>, <extra_id_1>, ..: sentinels of denoising models
    prefix: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, files: dict[str, Path], extras: tuple[Path, ...] = ()) -> None:
        self.files = files
        self.extras = extras

    def describe(self) -> dict[str, Any]:
        """The descriptor as plain JSON values."""
        return {
            "format": 1,
            "type": self.type_name,
            "files": {option: path.name for option, path in self.files.items()},
            "sha256": {path.name: digest(path) for path in self.files.values()},
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "bos": self.bos,
            "eos": self.eos,
            "pad": self.pad,
            "unk": self.unk,
            "sep": self.sep,
            "cls": self.cls,
            "mask": self.mask,
            "extra_ids": list(self.extra_ids),
        }

    def save(self, directory: str | Path) -> None:
        """Copy the files into `directory` (made if absent) and write the descriptor last."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        for path in (*self.files.values(), *self.extras):
            if path.resolve() != (target / path.name).resolve():
                shutil.copyfile(path, target / path.name)
        text = json.dumps(self.describe(), indent=2) + "\n"
        temporary = target / (DESCRIPTOR + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target / DESCRIPTOR)

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""

    def encode_flat(self, texts: list[str]) -> Flat:
        """The ids of all texts in a row, and the length of each."""
        rows = self.encode_batch(texts)
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(map(len, rows)))
        return flat, np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes read the files again instead of copying the tables
        return (type(self), tuple(self.files.values()))


def joined(rows: list[npt.NDArray[np.integer]]) -> Flat:
    """Arrays of ids as one row and their lengths."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return (np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)), lengths


def need_file(path: str | Path, option: str) -> Path:
    """`path` as a Path, refused when it is missing, a directory, or empty."""
    given = Path(path).expanduser()
    if given.is_file() and given.stat().st_size > 0:
        return given.absolute()
    kinds = ((given.is_file(), "the file is empty"), (given.is_dir(), "it is a directory"))
    case = next((case for holds, case in kinds if holds), "there is no such file")
    raise refuse(f"{option} {path}", f"{case}: {given.absolute()}", f"{option} with the path of a complete local file")


def need_library(name: str, wanted_by: str) -> Any:
    """The library `name`, imported now; refused with the install line when it is absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise refuse(wanted_by, f"it needs the package {name}: {error}", f"pip install {name}") from error


def ids_by(library: Any, texts: list[str]) -> list[list[int]]:
    """The ids of each text by a tokenizer of the package `tokenizers`, without special tokens around them."""
    try:
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]
    except TypeError as error:
        raise not_unicode(texts) from error


def not_unicode(texts: list[str]) -> Exception:
    """The refusal of texts with halves of surrogate pairs: what bytes that are not UTF-8 become on a command line."""
    wrong = next((text for text in texts if not _is_unicode(text)), "")
    return refuse(f"the text {ascii(wrong[:60])}", "it holds characters that UTF-8 cannot write", "text in UTF-8")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(option: str, path: Path, error: Exception, kind: str) -> Exception:
    """The refusal of a file that its library cannot read."""
    return refuse(f"{option} {path}", f"it is not a readable {kind}: {error}", f"{option} with a complete {kind}")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
