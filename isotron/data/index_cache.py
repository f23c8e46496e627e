"""Built indexes kept on disk as plain .npy files, found again by a description of what they were built from. PURE.

Any number of processes may build the same entry at once: each writes its own temporary files and renames them, and
all of them write the same bytes. The description is written last and makes the entry valid.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
KEEP = 1 << 20  # bytes: a smaller entry is quicker to build than to find, and would only litter the data's directory
VERSION = 1  # of the algorithms: part of every description


@dataclass(frozen=True)
class Expected:
    """What an entry will take, for the log and for whether it is kept: bytes, seconds, and what it is made of."""

    nbytes: int
    seconds: float
    what: str


class IndexCache:
    """Arrays by description in one directory, entries of at least KEEP bytes.

    required: that the directory cannot be written is an error, not a remark.
    """

    def __init__(self, directory: str | Path, log: Callable[[str], None], required: bool = False) -> None:
        self.directory, self.log, self.required = Path(directory), log, required

    def get(self, description: dict[str, Any], expected: Expected, build: Callable[[], Arrays]) -> Arrays:
        """The arrays that `description` stands for: mapped from disk, or built now and stored."""
        text = json.dumps(description | {"version": VERSION}, sort_keys=True, indent=1)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        arrays = self._load(key, text)
        if arrays is not None:
            return arrays
        if expected.nbytes < KEEP:
            return build()
        named = f"{description.get('prefix', 'the blend')}: {expected.what}, {expected.nbytes / 1e6:,.1f} MB"
        self.log(f"building the index of {named}, about {expected.seconds:,.0f} s; to be kept in {self.directory}")
        arrays = build()
        try:
            self._store(key, text, arrays)
        except OSError as error:
            if self.required:
                raise refuse(
                    f"--data-cache-path {self.directory}",
                    f"indexes cannot be written there: {error}",
                    "--data-cache-path with a directory that this user may write",
                ) from error
            why = error.strerror or str(error)
            self.log(f"indexes are built at every start: {self.directory} cannot be written ({why})")
            return arrays
        return self._load(key, text) or arrays  # mapped, so that the processes of one machine share the memory

    def _load(self, key: str, text: str) -> Arrays | None:
        """The stored arrays, or None when they are absent, unreadable or of another description."""
        try:
            stored = json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8"))
            if stored["description"] != json.loads(text):
                return None
            found: Arrays = {}
            for name, (shape, kind) in stored["arrays"].items():
                array = np.load(self.directory / f"{key}-{name}.npy", mmap_mode="r", allow_pickle=False)
                if list(array.shape) != shape or array.dtype.str != kind:
                    return None
                found[name] = array
            return found
        except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: it is built again
            return None

    def _store(self, key: str, text: str, arrays: Arrays) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            temporary = self.directory / f"{key}-{name}.tmp-{os.getpid()}"
            with temporary.open("wb") as stream:
                np.save(stream, array, allow_pickle=False)
            temporary.replace(self.directory / f"{key}-{name}.npy")
        shapes = {name: [list(array.shape), array.dtype.str] for name, array in arrays.items()}
        temporary = self.directory / f"{key}.tmp-{os.getpid()}"
        temporary.write_text(json.dumps({"description": json.loads(text), "arrays": shapes}, indent=1) + "\n")
        temporary.replace(self.directory / f"{key}.json")
