"""What an interrupted conversion has finished: files by name, size and hash, valid for one plan only. PURE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isotron.core.checkpoint.format import FileEntry
from isotron.core.checkpoint.locate import sha256_of

NAME = "convert.json"


class Progress:
    """The notes of one conversion in its working directory; another plan's notes and files are not used."""

    def __init__(self, work: Path, plan: Any, sources: Sequence[Path]) -> None:
        stamps = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in sources]
        self.plan = hashlib.sha256(json.dumps([plan, stamps], sort_keys=True).encode()).hexdigest()
        self.work, self.file = work, work / NAME
        self.done: dict[str, FileEntry] = {}
        self._read()

    def _read(self) -> None:
        try:
            notes = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if notes.get("plan") == self.plan:
            self.done = {name: FileEntry(int(size), str(digest)) for name, (size, digest) in notes["files"].items()}

    def finished(self, name: str) -> FileEntry | None:
        """The entry of a file that an earlier attempt wrote, if its bytes are still as they were."""
        entry, file = self.done.get(name), self.work / name
        if entry is None or not file.is_file() or file.stat().st_size != entry.bytes:
            return None
        return entry if sha256_of(file) == entry.sha256 else None

    def note(self, name: str, entry: FileEntry) -> None:
        """A file is complete."""
        self.done[name] = entry
        notes = {"plan": self.plan, "files": {n: [e.bytes, e.sha256] for n, e in self.done.items()}}
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(notes), encoding="utf-8")
        temporary.replace(self.file)
