"""Convert a model between formats, tensor by tensor: one tensor in memory, resumable, checked by reading it all again.

The result is written to `DST.partial` and gets its name when it is complete. An attempt that was cut off goes on with
the first file that is not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from isotron.core.checkpoint.disk import free_bytes, sync_directory
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.format import FileEntry
from isotron.core.errors import refuse
from isotron.hub.check import Line, check_result, table
from isotron.hub.families import spelling_of
from isotron.hub.megatron_targets import megatron_target
from isotron.hub.opened import Opened, open_model
from isotron.hub.progress import NAME, Progress
from isotron.hub.targets import Files, HuggingFace, Isotron, Meta, Target, make_room

FORMATS = ("isotron", "hf", "megatron")


@dataclass(frozen=True)
class Converted:
    """What was written where. `reused`: files that an earlier attempt had completed. `notes`: for the reader."""

    source: str
    result: str
    format: str
    family: str
    tensors: int
    bytes: int
    files: int
    reused: int
    notes: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class _Job:
    """A conversion in progress: files by name with their planned tensors."""

    opened: Opened
    to: str
    destination: Path
    work: Path
    dtype: torch.dtype | None
    target: Target
    files: Files


def convert(
    source: str | Path,
    result: str | Path,
    to: str,
    meta: Meta,
    dtype: str = "",
    file_bytes: int = 0,
    tp: int = 1,
    pp: int = 1,
    vocab_size: int = 0,
    megatron: Mapping[str, str] | None = None,
    optimizer_state: str = "auto",
) -> Converted:
    """Convert a model to format `to` ("isotron", "hf" or "megatron"); refuses a result that exists.

    `meta(opened, tokenizer directory or "")` is the meta of an isotron checkpoint. `dtype`: another floating-point
    type, empty keeps each tensor's. `file_bytes`: the largest file. `tp`, `pp`: the layout of Megatron's result.
    `vocab_size`: real entries of a Megatron source. `megatron`: see `megatron_target`. An empty `to` is for a Megatron
    source, which is written in its own format again. `optimizer_state`: of a Megatron source, for an isotron result;
    "auto" takes it where it can be read, "need" refuses otherwise, "drop" leaves it.
    """
    destination = Path(result).expanduser()
    _check_destination(destination)
    opened = open_model(source, vocab_size, to == "isotron" and optimizer_state != "drop")
    if optimizer_state == "need" and opened.trained is None:
        _refuse_state(opened, to)
    kind: torch.dtype | None = getattr(torch, dtype) if dtype else None
    to = to or _same_format(opened)
    target: Target
    if to == "hf":
        target = HuggingFace(opened, kind, file_bytes)
    elif to == "isotron":
        target = Isotron(opened, kind, file_bytes, destination, meta)
    else:
        target = megatron_target(opened, kind, file_bytes, (tp, pp), megatron or {})
    work = destination.with_name(destination.name + ".partial")
    job = _Job(opened, to, destination, work, kind, target, target.files())
    return _run(job, dtype)


def _run(job: _Job, dtype: str) -> Converted:
    """Write, check, publish."""
    job.work.mkdir(parents=True, exist_ok=True)
    entries, reused = _write(job, dtype)
    notes = job.target.finish(job.work, job.files, entries)
    check_result(job.opened, job.work, job.to, job.dtype)
    (job.work / NAME).unlink()
    make_room(job.destination)
    sync_directory(job.work)
    job.target.publish(job.work, job.destination)
    tensors = [t for group in job.files.values() for t in group]
    model = job.opened.model
    lines = table(model, job.opened.source, spelling_of(model.family), job.dtype)
    return Converted(str(job.opened.path), str(job.destination), job.to, model.family, len(tensors),
                     sum(t.bytes for t in tensors), len(job.files), reused, tuple(notes), lines)  # fmt: skip


def _refuse_state(opened: Opened, to: str) -> None:
    why = getattr(opened.source, "left_behind", "it is not a Megatron checkpoint")
    case = why if to == "isotron" else f"--to {to} has no place for it"
    fix = "--optimizer-state drop, which takes the weights alone"
    raise refuse(f"--optimizer-state need of {opened.path}", case, fix)


def _same_format(opened: Opened) -> str:
    """Megatron's, for a source that is Megatron's."""
    if hasattr(opened.source, "scanned"):
        return "megatron"
    case = "only a Megatron checkpoint is rewritten in its own format; any layout loads the others as they are"
    raise refuse(f"convert {opened.path} without --to", case, "isotron convert SRC DST --to hf")


def _check_destination(destination: Path) -> None:
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise refuse(
            f"convert to {destination}", "it exists, and nothing is overwritten", "a directory that does not exist yet"
        )


def _write(job: _Job, dtype: str) -> tuple[dict[str, FileEntry], int]:
    """All files of tensors; those that an earlier attempt completed stay."""
    tensors = {name: [[t.key, t.shape, dtype_name(t.dtype)] for t in group] for name, group in job.files.items()}
    plan = [str(job.opened.path.resolve()), job.to, dtype, tensors]
    progress = Progress(job.work, plan, job.opened.weight_files)
    found = {name: progress.finished(name) for name in job.files}
    need = sum(t.bytes for name, group in job.files.items() if found[name] is None for t in group)
    if need > free_bytes(job.work):
        fix = f"another disk, or free {need - free_bytes(job.work)} bytes; what is done is kept"
        raise refuse(
            f"convert to {job.destination}", f"{need} bytes are still to write, {free_bytes(job.work)} are free", fix, 1
        )
    for leftover in [f for f in job.work.rglob("*") if f.is_file()]:
        name = leftover.relative_to(job.work).as_posix()
        if name != NAME and found.get(name) is None:
            leftover.unlink()
    entries: dict[str, FileEntry] = {}
    for name, group in job.files.items():
        entry = found[name]
        if entry is None:
            entry = job.target.write(job.work / name, group)
            progress.note(name, entry)
        entries[name] = entry
    return entries, sum(entry is not None for entry in found.values())
