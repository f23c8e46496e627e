"""Files that are mapped into memory: where tensors live that need not be in memory all the time.

A file has no name and goes with the process. The system reads and writes its pages, reads ahead when it is told to, and
takes them from memory when they are left.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod

import torch
from torch import Tensor

from isotron.core.errors import refuse

ALIGN = 64


class Disk:
    """A file for tensors of `size` bytes together, whose room is taken at once: a page that the disk has no room for
    when it is written would end the process. Its start is the start of a page.
    """

    def __init__(self, directory: str, size: int) -> None:
        size = max(size, 1)  # a rank may hold nothing, and a file of no bytes cannot be mapped
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                _take_room(file.fileno(), size)
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            asked, case = f"--offload-dir {directory}", f"no file of {size} bytes can be mapped there: {error}"
            raise refuse(asked, case, "a directory on a local disk with room, or leave it out", 1) from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part of the file, which holds zeros."""
        size = prod(shape) * dtype.itemsize
        place = self._bytes[self._used : self._used + size]
        self._used += -(-size // ALIGN) * ALIGN
        return place.view(dtype).view(shape)

    def fetch(self, part: Tensor | None = None) -> None:
        """Begin to read all of it, or one of its tensors."""
        start, stop = self._range(part)
        page = mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_WILLNEED, start // page * page, stop - start // page * page)

    def leave(self, part: Tensor | None = None) -> None:
        """Its pages may go, or those that one tensor has for itself; what was changed is written first."""
        start, stop = self._range(part)
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop if part is None else stop // page * page
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _range(self, part: Tensor | None) -> tuple[int, int]:
        if part is None:
            return 0, len(self._map)
        start = part.data_ptr() - self._bytes.data_ptr()
        return start, start + part.nbytes


def _take_room(file: int, size: int) -> None:
    """Make a file so long, on the disk too where the system can (macOS cannot)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


class Files:
    """Files of one directory for bytes that come and go; one that is free again serves the next of its size."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._free: dict[int, list[tuple[Disk, Tensor]]] = {}

    def take(self, size: int) -> tuple[Disk, Tensor]:
        """A file of so many bytes."""
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        disk = Disk(self.directory, size)
        return disk, disk.zeros((size,), torch.uint8)

    def give_back(self, taken: tuple[Disk, Tensor]) -> None:
        """Nobody reads it any more."""
        self._free[taken[1].nbytes].append(taken)
