"""Write files so that they are on disk and known by their hash, and directories that survive a power cut. PURE."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path

from isotron.core.checkpoint.format import FileEntry

BLOCK_BYTES = 2**22


def write_blocks(file: Path, blocks: Iterator[bytes | memoryview], sync: bool = True) -> FileEntry:
    """Write a new file from blocks of bytes, hashing on the way, and (`sync`) sync it to disk.

    Large blocks are hashed by another thread while they are written, for each takes a core for about as long; and what
    is written is sent to the disk by a third meanwhile, which otherwise would have nothing to do until the end.
    """
    digest, size = hashlib.sha256(), 0
    flushed: Future[None] | None = None
    with file.open("xb", buffering=0) as f, ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as flushing:
        for block in blocks:  # threads start with their first task
            hashed = hashing.submit(digest.update, block) if len(block) >= BLOCK_BYTES else None
            _write_all(f, block)
            if hashed is None:
                digest.update(block)
            elif sync and (flushed is None or flushed.done()):
                flushed = flushing.submit(flush_data, f.fileno())
            if hashed is not None:
                hashed.result()
            size += len(block)
        if flushed is not None:
            flushed.result()
        if sync:
            os.fsync(f.fileno())
    return FileEntry(size, digest.hexdigest())


def flush_data(handle: int) -> None:
    """Bring what has been written to the disk, without what only a listing of the directory needs."""
    getattr(os, "fdatasync", os.fsync)(handle)


def _write_all(f: RawIOBase, block: bytes | memoryview) -> None:
    """All of a block: one system call may take less, and says how much."""
    left = memoryview(block)
    while left:
        left = left[f.write(left) or 0 :]


def write_extra(directory: Path, name: str, content: bytes | Path) -> FileEntry:
    """Write one further file, given as bytes or as a file to copy, with the directories on its way."""
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    entry = write_blocks(file, iter([content]) if isinstance(content, bytes) else _read_blocks(content))
    for parent in file.relative_to(directory).parents:
        sync_directory(directory / parent)
    return entry


def _read_blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as f:
        while block := f.read(BLOCK_BYTES):
            yield block


def sync_directory(directory: Path) -> None:
    """Make created and renamed entries of a directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(directory: Path) -> int:
    """Bytes that can still be written where `directory` lies."""
    return shutil.disk_usage(directory).free
