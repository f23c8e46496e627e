"""What a conversion writes, by format: which files with which tensors, what else belongs to them, and the last name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from isotron.core.checkpoint.disk import sync_directory, write_extra
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.format import Chunk, Entry, FileEntry, Manifest
from isotron.core.checkpoint.locate import step_name
from isotron.core.checkpoint.publish import publish, temporary
from isotron.core.checkpoint.save import write_manifest
from isotron.core.checkpoint.weights import is_optimizer_state
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.hub import export
from isotron.hub.families import spelling_of
from isotron.hub.folder import CONFIG
from isotron.hub.opened import ORIGIN, Opened
from isotron.hub.writer import Planned, deal, write_planned
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig

ISOTRON_FILE_BYTES = 10**9

Meta = Callable[[Opened, str], Mapping[str, Any]]
Files = Mapping[str, Sequence[Planned]]
Entries = dict[str, FileEntry]


class Target(Protocol):
    """One format, for one conversion."""

    def files(self) -> Files:
        """Files by name with the tensors in each; refuses a model that the format has no place for."""

    def write(self, file: Path, tensors: Sequence[Planned]) -> FileEntry:
        """Write one of them."""

    def finish(self, work: Path, files: Files, entries: Entries) -> list[str]:
        """Write all that belongs beside the tensors; notes for the reader."""

    def publish(self, work: Path, destination: Path) -> None:
        """Give the complete result its name."""


class HuggingFace:
    """A directory of Hugging Face. `dtype` None keeps each tensor's; `file_bytes` 0 is the library's limit."""

    def __init__(self, opened: Opened, dtype: torch.dtype | None, file_bytes: int) -> None:
        self.opened, self.dtype, self.file_bytes = opened, dtype, file_bytes or export.SHARD_BYTES
        self.spelling = spelling_of(opened.model.family)

    def files(self) -> Files:
        """As many as the limit asks for."""
        opened = self.opened
        plan = export.planned(opened.source, opened.model, self.spelling, self.dtype, opened.close)
        groups = deal(plan, self.file_bytes)
        return dict(zip(export.shard_names(len(groups)), groups, strict=True))

    def write(self, file: Path, tensors: Sequence[Planned]) -> FileEntry:
        """Safetensors."""
        return write_planned(file, tensors)

    def finish(self, work: Path, files: Files, entries: Entries) -> list[str]:
        """config.json, the index, and the companions that came with the source."""
        opened, dtype = self.opened, dtype_name(next(iter(files.values()))[0].dtype)
        beside = export.extra_files(opened.files, opened.tokens)
        beside[CONFIG] = export.config_text(opened.model, self.spelling, dtype, opened.kept, opened.tokens)
        if len(files) > 1:
            beside[export.INDEX] = export.index_text(files)
        for name, content in beside.items():
            (work / name).unlink(missing_ok=True)
            write_extra(work, name, content)
        return [] if opened.files else ["the source has no tokenizer, so the result has none"]

    def publish(self, work: Path, destination: Path) -> None:
        """The directory itself."""
        os.replace(work, destination)
        sync_directory(destination.absolute().parent)


class Isotron:
    """A run with one step. `meta(opened, tokenizer directory or "")` is what its manifest says of the run."""

    def __init__(
        self, opened: Opened, dtype: torch.dtype | None, file_bytes: int, destination: Path, meta: Meta
    ) -> None:
        self.opened, self.dtype, self.file_bytes = opened, dtype, file_bytes or ISOTRON_FILE_BYTES
        self.destination, self.meta = destination, meta
        self.step = opened.step if opened.trained else 0

    def files(self) -> Files:
        """Named as one rank would name them."""
        groups = deal([self._planned(name) for name in self.opened.source.names()], self.file_bytes)
        return {f"rank_00000{f'_{i}' if i else ''}.safetensors": group for i, group in enumerate(groups)}

    def _planned(self, name: str) -> Planned:
        stored, shape = self.opened.source.info(name)
        kind = cast_to(name, stored, self.dtype)

        def make() -> torch.Tensor:
            out = torch.full(shape, torch.nan, dtype=kind)
            self.opened.source.read(name, whole(shape), out)
            self.opened.close()
            export.refuse_nan(out, name)
            return out

        return Planned(f"{name}@0", kind, shape, make)

    def write(self, file: Path, tensors: Sequence[Planned]) -> FileEntry:
        """Safetensors."""
        return write_planned(file, tensors)

    def finish(self, work: Path, files: Files, entries: Entries) -> list[str]:
        """The manifest, with the tokenizer as isotron stores it and the origin's own files beside it."""
        opened = self.opened
        with tempfile.TemporaryDirectory() as scratch:
            extras, notes = _tokenizer(opened, Path(scratch))
            origin = [*opened.files, *([opened.path / CONFIG] if (opened.path / CONFIG).is_file() else [])]
            extras |= {f"{ORIGIN}/{file.name}": file for file in origin}
            for name, content in extras.items():
                (work / name).unlink(missing_ok=True)
                entries[name] = write_extra(work, name, content)
        tensors = {}
        for file, group in files.items():
            for t in group:
                chunk = Chunk(whole(t.shape), file, t.key)
                tensors[t.key.removesuffix("@0")] = Entry(dtype_name(t.dtype), t.shape, (chunk,))
        where = str((self.destination / step_name(self.step) / "tokenizer").absolute()) if not notes else ""
        (work / "manifest.json").unlink(missing_ok=True)
        write_manifest(work, Manifest(self.step, dict(self.meta(opened, where)), tensors, entries))
        return [*notes, *self._left_behind()]

    def _left_behind(self) -> list[str]:
        """What is said of an optimizer's state that is in the source and not in the result."""
        source = self.opened.source
        if not getattr(getattr(source, "scanned", None), "state", "") or self.opened.trained is not None:
            return []
        return [f"the optimizer's state stayed behind: {source.left_behind}"]  # type: ignore[attr-defined]

    def publish(self, work: Path, destination: Path) -> None:
        """A step directory, and the pointer to it."""
        destination.mkdir()
        os.replace(work, temporary(destination, step_name(self.step)))
        publish(destination, step_name(self.step), 0)


def cast_to(name: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in the result: `dtype` is for weights, and the optimizer's state stays as it is."""
    return dtype if dtype is not None and not is_optimizer_state(name) else stored


def _tokenizer(opened: Opened, scratch: Path) -> tuple[dict[str, Path], list[str]]:
    """The tokenizer's files as a checkpoint stores them; a note when there is none that isotron can read."""
    stored = opened.path / "tokenizer"
    try:
        place = stored if stored.is_dir() else opened.path
        build_tokenizer(TokenizerConfig(tokenizer_model=str(place))).save(scratch)
    except Refused as refused:
        return {}, [f"no tokenizer was stored: {refused.problems[0].case}"]
    return {f"tokenizer/{file.name}": file for file in sorted(scratch.iterdir())}, []


def make_room(destination: Path) -> None:
    """Take away an empty directory that stands where the result goes."""
    with suppress(FileNotFoundError):
        destination.rmdir()
