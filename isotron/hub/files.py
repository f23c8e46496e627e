"""Files that are read at many places: opened once, the ones used longest ago closed when there are many."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

OPEN_FILES = 16


class OpenFiles:
    """Descriptors by path, at most `OPEN_FILES` of them."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()

    def __getitem__(self, file: Path) -> int:
        if file not in self._files:
            while len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[file] = os.open(file, os.O_RDONLY)
        self._files.move_to_end(file)
        return self._files[file]

    def close(self) -> None:
        """Close all of them; asking for one opens it again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()
