"""How far a preprocessing job is, so that the same command goes on after a kill. PURE.

Every so often the outputs are brought to disk and a small file beside them says how far they and the input are. It
holds for one command over unchanged inputs: anything else begins anew.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isotron.data.indexed_writer import IndexedWriter

SECONDS = 30.0  # between two entries: what a kill costs at most


@dataclass
class Counts:
    """Records read so far, and what was left out or cut of them."""

    empty: int = 0
    truncated: int = 0
    bad: int = 0
    records: int = 0

    def add(self, empty: int, truncated: int, bad: int, records: int) -> None:
        """Count one more batch."""
        self.empty, self.truncated = self.empty + empty, self.truncated + truncated
        self.bad, self.records = self.bad + bad, self.records + records


class Journal:
    """The file `{prefix}.preprocess.json` and the job that it stands for (`job`: plain JSON values)."""

    def __init__(self, prefix: str, job: dict[str, Any]) -> None:
        self.path = Path(f"{prefix}.preprocess.json")
        self.job = json.loads(json.dumps(job))
        self._last = time.monotonic()

    def begin(self, writers: Sequence[IndexedWriter]) -> tuple[tuple[int, int], Counts]:
        """Bring the writers to where the job was left; (first file, batches of it that are done) and the counts."""
        found = self._read()
        if found is not None and all(w.rewind(mark) for w, mark in zip(writers, found["marks"], strict=True)):
            return (found["place"][0], found["place"][1] + 1), Counts(**found["counts"])
        for writer in writers:
            writer.restart()
        return (0, 0), Counts()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none, or a damaged one: the job begins anew
            return None
        return found if isinstance(found, dict) and found.get("job") == self.job else None

    def due(self) -> bool:
        """Whether it is time for an entry."""
        return time.monotonic() - self._last >= SECONDS

    def write(self, place: tuple[int, int], writers: Sequence[IndexedWriter], counts: Counts) -> None:
        """An entry: everything up to batch `place` = (file, batch of it) is on disk."""
        marks = [writer.mark() for writer in writers]
        entry = {"job": self.job, "place": place, "marks": marks, "counts": asdict(counts)}
        temporary = Path(f"{self.path}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)
        self._last = time.monotonic()

    @property
    def exists(self) -> bool:
        """Whether there is an entry of this job to go on from."""
        return self._read() is not None

    def remove(self) -> None:
        """The job is done, or there is nothing to go on with."""
        self.path.unlink(missing_ok=True)
