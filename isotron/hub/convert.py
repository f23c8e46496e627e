"""Convert a model between formats, tensor by tensor: one tensor in memory, resumable, checked by reading it all again.

The result is written to `DST.partial` and gets its name when it is complete. An attempt that was cut off goes on with
the first file that is not complete.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotron.core.checkpoint.disk import free_bytes, sync_directory, write_extra
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.format import Chunk, Entry, FileEntry, Manifest
from isotron.core.checkpoint.locate import step_name
from isotron.core.checkpoint.publish import publish, temporary
from isotron.core.checkpoint.save import write_manifest
from isotron.core.errors import Refused, refuse
from isotron.core.layout import whole
from isotron.hub import export
from isotron.hub.check import Line, check_result, table
from isotron.hub.families import Spelling, spelling_of
from isotron.hub.folder import CONFIG
from isotron.hub.megatron import write as megatron
from isotron.hub.megatron.args import write_args
from isotron.hub.megatron.ask import TRACKER
from isotron.hub.opened import ORIGIN, Opened, open_model
from isotron.hub.progress import NAME, Progress
from isotron.hub.writer import Planned, deal, write_planned
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig

FORMATS = ("isotron", "hf", "megatron")
ISOTRON_FILE_BYTES = 10**9

Meta = Callable[[Opened, str], Mapping[str, Any]]


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
    files: Mapping[str, list[Planned]]
    tp: int
    pp: int

    @property
    def spelling(self) -> Spelling:
        """How Hugging Face spells the family."""
        return spelling_of(self.opened.model.family)

    @property
    def tensors(self) -> list[Planned]:
        """All of them."""
        return [t for group in self.files.values() for t in group]


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
) -> Converted:
    """Convert a model to format `to` ("isotron", "hf" or "megatron"); refuses a result that exists.

    `meta(opened, tokenizer directory or "")` is the meta of an isotron checkpoint. `dtype`: another floating-point
    type, empty keeps each tensor's. `file_bytes`: the largest file. `tp`, `pp`: the layout that Megatron's arguments
    name, and for which its vocabulary is padded. `vocab_size`: real entries of a Megatron source.
    """
    destination = Path(result).expanduser()
    _check_destination(destination)
    job = _job(open_model(source, vocab_size), destination, to, dtype, file_bytes, (tp, pp))
    job.work.mkdir(parents=True, exist_ok=True)
    entries, reused = _write(job, dtype)
    notes = _finish(job, entries, meta)
    check_result(job.opened, job.work, to, job.dtype)
    (job.work / NAME).unlink()
    _publish(job)
    total = sum(t.bytes for t in job.tensors)
    lines = table(job.opened.model, job.opened.source, job.spelling, job.dtype)
    return Converted(str(job.opened.path), str(destination), to, job.opened.model.family, len(job.tensors), total,
                     len(job.files), reused, tuple(notes), lines)  # fmt: skip


def _finish(job: _Job, entries: dict[str, FileEntry], meta: Meta) -> list[str]:
    if job.to == "hf":
        return _finish_hf(job)
    if job.to == "isotron":
        return _finish_isotron(job, entries, meta)
    megatron.finish(job.work, job.files, job.opened.model, job.tp, job.pp)
    return ["Megatron has no place for a tokenizer: name it with its own options"]


def _job(opened: Opened, destination: Path, to: str, dtype: str, file_bytes: int, layout: tuple[int, int]) -> _Job:
    kind: torch.dtype | None = getattr(torch, dtype) if dtype else None
    work = destination.with_name(destination.name + ".partial")
    if to == "hf":
        plan = export.planned(opened.source, opened.model, spelling_of(opened.model.family), kind, opened.close)
        groups = deal(plan, file_bytes or export.SHARD_BYTES)
        names = export.shard_names(len(groups))
    elif to == "megatron":
        write_args(opened.model, dtype, *layout)  # refuses before anything is written
        found = megatron.planned(opened.source, opened.model, layout[0], kind, opened.close)
        groups = deal(found, file_bytes or ISOTRON_FILE_BYTES)
        names = [f"__0_{i}.distcp" for i in range(len(groups))]
    else:
        groups = deal([_ours(opened, name, kind) for name in opened.source.names()], file_bytes or ISOTRON_FILE_BYTES)
        names = [f"rank_00000{f'_{i}' if i else ''}.safetensors" for i in range(len(groups))]
    return _Job(opened, to, destination, work, kind, dict(zip(names, groups, strict=True)), *layout)


def _ours(opened: Opened, name: str, dtype: torch.dtype | None) -> Planned:
    """One of our tensors as a whole."""
    stored, shape = opened.source.info(name)

    def make() -> torch.Tensor:
        out = torch.full(shape, torch.nan, dtype=dtype or stored)
        opened.source.read(name, whole(shape), out)
        opened.close()
        export.refuse_nan(out, name)
        return out

    return Planned(f"{name}@0", dtype or stored, shape, make)


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
    for leftover in job.work.iterdir():
        if leftover.is_file() and leftover.name != NAME and found.get(leftover.name) is None:
            leftover.unlink()
    entries: dict[str, FileEntry] = {}
    for name, group in job.files.items():
        entry = found[name]
        if entry is None:
            write = megatron.write_distcp if job.to == "megatron" else write_planned
            entry = write(job.work / name, group)
            progress.note(name, entry)
        entries[name] = entry
    return entries, sum(entry is not None for entry in found.values())


def _finish_hf(job: _Job) -> list[str]:
    opened, dtype = job.opened, dtype_name(job.tensors[0].dtype)
    files = export.extra_files(opened.files, opened.tokens)
    files[CONFIG] = export.config_text(opened.model, job.spelling, dtype, opened.kept, opened.tokens)
    if len(job.files) > 1:
        files[export.INDEX] = export.index_text(job.files)
    for name, content in files.items():
        (job.work / name).unlink(missing_ok=True)
        write_extra(job.work, name, content)
    return [] if opened.files else ["the source has no tokenizer, so the result has none"]


def _finish_isotron(job: _Job, entries: dict[str, FileEntry], meta: Meta) -> list[str]:
    """The manifest, with the tokenizer as isotron stores it and the origin's own files beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        extras, notes = _tokenizer(job.opened, Path(scratch))
        origin = [*job.opened.files, *([job.opened.path / CONFIG] if (job.opened.path / CONFIG).is_file() else [])]
        extras |= {f"{ORIGIN}/{file.name}": file for file in origin}
        for name, content in extras.items():
            (job.work / name).unlink(missing_ok=True)
            entries[name] = write_extra(job.work, name, content)
    tensors = {}
    for file, group in job.files.items():
        for t in group:
            chunk = Chunk(whole(t.shape), file, t.key)
            tensors[t.key.removesuffix("@0")] = Entry(dtype_name(t.dtype), t.shape, (chunk,))
    where = str((job.destination / step_name(0) / "tokenizer").absolute()) if not notes else ""
    (job.work / "manifest.json").unlink(missing_ok=True)
    write_manifest(job.work, Manifest(0, dict(meta(job.opened, where)), tensors, entries))
    return notes


def _tokenizer(opened: Opened, scratch: Path) -> tuple[dict[str, Path], list[str]]:
    """The tokenizer's files as a checkpoint stores them; a note when there is none that isotron can read."""
    stored = opened.path / "tokenizer"
    try:
        place = stored if stored.is_dir() else opened.path
        build_tokenizer(TokenizerConfig(tokenizer_model=str(place))).save(scratch)
    except Refused as refused:
        return {}, [f"no tokenizer was stored: {refused.problems[0].case}"]
    return {f"tokenizer/{file.name}": file for file in sorted(scratch.iterdir())}, []


def _publish(job: _Job) -> None:
    """Give the complete result its name."""
    with suppress(FileNotFoundError):
        job.destination.rmdir()
    sync_directory(job.work)
    if job.to == "hf":
        os.replace(job.work, job.destination)
        sync_directory(job.destination.absolute().parent)
        return
    job.destination.mkdir()
    if job.to == "megatron":
        os.replace(job.work, job.destination / "release")
        write_extra(job.destination, TRACKER, b"release")
        sync_directory(job.destination)
        return
    os.replace(job.work, temporary(job.destination, step_name(0)))
    publish(job.destination, step_name(0), 0)
