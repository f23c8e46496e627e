"""Save a checkpoint: every rank contributes chunks, each element is written once, and all appears or nothing does.

`stage` decides what this rank writes, `write_staged` writes it, `save_checkpoint` is both with the agreement of all
ranks around them. A save in the background stages copies in host memory and runs the rest later.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from isotron.core.checkpoint.cover import cover_error, lies_inside, region_text
from isotron.core.checkpoint.disk import free_bytes, sync_directory, write_blocks, write_extra
from isotron.core.checkpoint.files import Item, dtype_name, write_tensors
from isotron.core.checkpoint.format import (
    DTYPES,
    MANIFEST,
    Chunk,
    Entry,
    FileEntry,
    Manifest,
    file_name_error,
    parse_manifest,
    tensor_name_error,
)
from isotron.core.checkpoint.locate import step_name
from isotron.core.checkpoint.publish import clean_up, publish, temporary
from isotron.core.checkpoint.ranks import Ranks, together
from isotron.core.errors import Refused, refuse
from isotron.core.layout import Box, Ints

FILE_BYTES = 2**32
SPARE_BYTES = 2**24  # left free for manifest, pointer and the logs of the run

ExtraFiles = Mapping[str, bytes | Path] | Path


@dataclass(frozen=True)
class Saved:
    """What this rank contributes to one tensor: regions of the global tensor and tensors that hold them.

    Every element of the global tensor comes from exactly one rank. `pieces` may be empty (the rank then only states
    dtype and shape), and so may boxes. The tensors may have any strides and device.
    """

    name: str
    dtype: torch.dtype
    global_shape: Ints
    pieces: list[tuple[Box, torch.Tensor]]


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint: what every tensor is (dtype, shape), and the items of each of its files."""

    declared: dict[str, tuple[str, Ints]]
    files: dict[str, list[Item]]

    @property
    def bytes(self) -> int:
        """Payload of this rank in bytes."""
        return sum(item.bytes for items in self.files.values() for item in items)

    def table(self) -> list[Any]:
        """What rank 0 must know, in JSON: [name, dtype, shape, [[offset, shape, file, key], ...]] per tensor."""
        chunks: dict[str, list[Any]] = {name: [] for name in self.declared}
        for file, items in self.files.items():
            for item in items:
                chunks[item.name].append([item.box.offset, item.box.shape, file, item.key])
        return [[name, dtype, shape, chunks[name]] for name, (dtype, shape) in self.declared.items()]


def stage(tensors: Iterable[Saved], rank: int) -> Staged:
    """Check this rank's tensors and lay them out in files `rank_00000.safetensors`, `rank_00000_1.safetensors`, ...

    A file is closed when it holds about 4 GB. Nothing is copied: the items refer to the tensors.
    """
    declared: dict[str, tuple[str, Ints]] = {}
    files: dict[str, list[Item]] = {}
    names = (f"rank_{rank:05d}{f'_{k}' if k else ''}.safetensors" for k in count())
    room, current = -1, list[Item]()
    for saved in tensors:
        _check_saved(saved, saved.name in declared)
        declared[saved.name] = dtype_name(saved.dtype), tuple(saved.global_shape)
        filled = ((box, t) for box, t in saved.pieces if box.size)
        for k, (box, tensor) in enumerate(filled):
            item = Item(saved.name, f"{saved.name}@{k}", box, tensor)
            if room < 0 or item.bytes > room:
                current = files.setdefault(next(names), [])
                room = FILE_BYTES
            current.append(item)
            room = max(0, room - item.bytes)
    return Staged(declared, files)


def _check_saved(saved: Saved, known: bool) -> None:
    """Refuse a tensor that cannot be stored, or whose boxes do not fit it."""
    name, shape, dtype = saved.name, tuple(saved.global_shape), dtype_name(saved.dtype)
    error = tensor_name_error(name)
    if error:
        raise _bad_tensor(name, f"its name {error}")
    if known:
        raise _bad_tensor(name, "one rank contributes it in two entries; put all its pieces into one")
    if dtype not in DTYPES:
        raise _bad_tensor(name, f"dtype {dtype} cannot be stored; possible are {', '.join(DTYPES)}")
    for box, tensor in saved.pieces:
        if not lies_inside(box, shape):
            raise _bad_tensor(name, f"region {region_text(box)} does not lie inside shape {list(shape)}")
        if tuple(tensor.shape) != box.shape or tensor.dtype != saved.dtype:
            found = f"{dtype_name(tensor.dtype)} of shape {list(tensor.shape)}"
            raise _bad_tensor(name, f"region {region_text(box)} of dtype {dtype} comes with a tensor {found}")


def _bad_tensor(name: str, case: str) -> Refused:
    return refuse(
        f"save the tensor {name!r}",
        case,
        "give each element of the tensor from exactly one rank, as pieces with the same dtype and global shape",
        exit_code=1,
    )


def write_staged(directory: Path, staged: Staged) -> dict[str, FileEntry]:
    """Write this rank's files into an existing directory, synced to disk; name -> size and hash."""
    return {name: write_tensors(directory / name, items) for name, items in staged.files.items()}


def save_checkpoint(
    directory: str | Path,
    step: int,
    tensors: Iterable[Saved],
    meta: dict[str, Any],
    ranks: Ranks,
    keep_last: int = 0,
    extra_files: ExtraFiles | None = None,
    keep_every: int = 0,
) -> Path:
    """Save a step under `directory` and return its path; called by all ranks together, which fail together.

    `meta` (JSON) and `extra_files` (name -> bytes or a file to copy, or a directory to copy whole) are taken from rank
    0. On any failure the checkpoints that were there stay as they were. `keep_last` complete steps are kept (0: all),
    and those that are a multiple of `keep_every` besides.
    """
    run, name = Path(directory), step_name(step)
    new, asked = temporary(run, name), f"save step {step} to {run}"

    def plan() -> Staged:
        _check_request(step, meta)
        return stage(tensors, ranks.rank)

    staged, plans = together(ranks, asked, plan, lambda s: [step, s.bytes, s.table()])

    def prepare() -> tuple[dict[str, Entry], dict[str, bytes | Path]]:
        if plans is None:
            return {}, {}
        entries, extras = combine([table for _, _, table in plans]), _extras(extra_files)
        make_room(run, new, plans, extras)
        return entries, extras

    (entries, extras), _ = together(ranks, asked, prepare)
    try:
        _, written = together(ranks, asked, lambda: write_part(new, staged, extras), _file_table)

        def finish() -> None:
            if written is not None:
                files = {file: FileEntry(*entry) for part in written for file, entry in part.items()}
                write_manifest(new, Manifest(step, meta, entries, files))
                publish(run, name, keep_last, keep_every)

        together(ranks, asked, finish)
    except Refused:
        if ranks.rank == 0:  # all ranks have stopped writing; what cannot be removed now goes at the next save
            shutil.rmtree(new, ignore_errors=True)
        raise
    return run / name


def write_part(new: Path, staged: Staged, extras: Mapping[str, bytes | Path]) -> dict[str, FileEntry]:
    """Write this rank's tensors and further files into the directory that rank 0 has made."""
    if not new.is_dir():
        raise refuse(
            f"save to {new.parent}",
            f"{new}, just made by rank 0, is not there on this rank",
            "save to a file system that all machines share",
            exit_code=1,
        )
    written = write_staged(new, staged)
    return written | {name: write_extra(new, name, content) for name, content in extras.items()}


def _file_table(written: Mapping[str, FileEntry]) -> dict[str, list[Any]]:
    return {name: [f.bytes, f.sha256] for name, f in written.items()}


def _check_request(step: int, meta: dict[str, Any]) -> None:
    if not 0 <= step < 10**18:
        raise refuse(f"save step {step}", "a step is a whole number from 0 to 10**18 - 1", "for example step 10")
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise refuse(
            f"save step {step} with meta {sorted(map(str, meta))}",
            f"meta cannot be written as JSON: {error}",
            "use dictionaries with string keys, lists, strings, finite numbers, true, false and null",
        ) from error


def combine(tables: Iterable[list[Any]]) -> dict[str, Entry]:
    """Tensors of the whole checkpoint from the tables of all ranks; each must be covered exactly once."""
    kinds: dict[str, tuple[str, Ints]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for rank, table in enumerate(tables):
        for name, dtype, shape, parts in table:
            kind = dtype, tuple(shape)
            if kinds.setdefault(name, kind) != kind:
                first = f"{kinds[name][0]} of shape {list(kinds[name][1])}"
                raise _bad_tensor(name, f"an earlier rank has {first}, rank {rank} has {dtype} of shape {shape}")
            new = [Chunk(Box(tuple(o), tuple(n)), file, key) for o, n, file, key in parts]
            chunks.setdefault(name, []).extend(new)
    for name, (_, shape) in kinds.items():
        error = cover_error(shape, [(c.box, c.file) for c in chunks[name]])
        if error:
            raise _bad_tensor(name, error)
    return {name: Entry(*kinds[name], tuple(chunks[name])) for name in kinds}


def _extras(files: ExtraFiles | None) -> dict[str, bytes | Path]:
    """Further files as name -> content, their names checked."""
    if isinstance(files, Path):
        files = {str(f.relative_to(files).as_posix()): f for f in sorted(files.rglob("*")) if f.is_file()}
    for name in files or {}:
        error = file_name_error(name)
        if error is None and name.startswith("rank_") and name.endswith(".safetensors"):
            error = "must not look like a file of tensors"
        if error:
            raise refuse(f"save the file {name!r}", f"its name {error}", "for example tokenizer/tokenizer.json")
    return dict(files or {})


def make_room(run: Path, new: Path, plans: list[Any], extras: Mapping[str, bytes | Path]) -> None:
    """Remove what earlier saves left, see that the new checkpoint fits, and make its directory."""
    steps_asked = sorted({step for step, _, _ in plans})
    if len(steps_asked) != 1:
        raise refuse(f"save to {run}", f"ranks ask for different steps {steps_asked}", "save one step on all ranks", 1)
    run.mkdir(parents=True, exist_ok=True)
    clean_up(run)
    need = sum(size for _, size, _ in plans) + SPARE_BYTES
    need += sum(len(c) if isinstance(c, bytes) else c.stat().st_size for c in extras.values())
    free = free_bytes(run)
    if need > free:
        raise refuse(
            f"save step {steps_asked[0]} to {run}",
            f"the checkpoint needs {need} bytes, {free} are free there; earlier checkpoints are as they were",
            f"free {need - free} bytes, keep fewer checkpoints (keep_last = 1), or save to another disk",
            exit_code=1,
        )
    new.mkdir()


def write_manifest(new: Path, manifest: Manifest) -> None:
    """See that all files are there in full size, then write the manifest and sync it with its directory.

    The manifest is first read back from its bytes: what is published can be loaded.
    """
    for name, file in manifest.files.items():
        found = (new / name).stat().st_size
        if found != file.bytes:
            raise OSError(f"{new / name} has {found} bytes, its writer wrote {file.bytes}")
    data = manifest.dumps()
    parse_manifest(data)
    write_blocks(new / MANIFEST, iter([data]))
    sync_directory(new)
