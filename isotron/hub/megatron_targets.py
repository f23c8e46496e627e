"""Megatron's two formats as results of a conversion: `torch_dist`, and legacy `torch` with a file for each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from isotron.core.checkpoint.disk import sync_directory, write_extra
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.format import FileEntry
from isotron.hub.megatron import ranks, write
from isotron.hub.megatron.args import write_args
from isotron.hub.megatron.ask import TRACKER
from isotron.hub.opened import Opened
from isotron.hub.targets import ISOTRON_FILE_BYTES, Entries, Files
from isotron.hub.writer import Planned, deal

_NO_TOKENIZER = "Megatron has no place for a tokenizer: name it with its own options"


class Dist:
    """`torch_dist`: any layout loads it. `tp` and `pp` stand in its arguments; its vocabulary is padded for `tp`."""

    def __init__(self, opened: Opened, dtype: torch.dtype | None, file_bytes: int, tp: int, pp: int) -> None:
        self.opened, self.dtype, self.file_bytes = opened, dtype, file_bytes or ISOTRON_FILE_BYTES
        self.tp, self.pp = tp, pp

    def files(self) -> Files:
        """As many as the limit asks for."""
        opened = self.opened
        write_args(opened.model, "", self.tp, self.pp)  # refuses before anything is written
        found = write.planned(opened.source, opened.model, self.tp, self.dtype, opened.close)
        return {f"__0_{i}.distcp": group for i, group in enumerate(deal(found, self.file_bytes))}

    def write(self, file: Path, tensors: Sequence[Planned]) -> FileEntry:
        """The archives of its tensors."""
        return write.write_distcp(file, tensors)

    def finish(self, work: Path, files: Files, entries: Entries) -> list[str]:
        """Index and arguments."""
        write.finish(work, files, self.opened.model, self.tp, self.pp)
        return [_NO_TOKENIZER]

    def publish(self, work: Path, destination: Path) -> None:
        """A release, and the tracker file that names it."""
        _release(work, destination)


class Ranks:
    """Legacy `torch`: a directory for each rank of `tp` x `pp`, with its part of the weights.

    `implementation`: whose names of norms, "transformer_engine" (Megatron's default) or "local".
    """

    def __init__(
        self, opened: Opened, dtype: torch.dtype | None, tp: int, pp: int, implementation: str = "transformer_engine"
    ) -> None:
        self.opened, self.dtype, self.tp, self.pp = opened, dtype, tp, pp
        self.implementation = implementation

    def files(self) -> Files:
        """One for each rank."""
        opened = self.opened
        ranks.refuse_uncut(opened.model, self.tp, self.pp)
        return ranks.planned(
            opened.source, opened.model, (self.tp, self.pp), self.dtype, opened.close, self.implementation
        )

    def write(self, file: Path, tensors: Sequence[Planned]) -> FileEntry:
        """An archive of the rank's tensors, with the arguments of a run."""
        args = write_args(self.opened.model, dtype_name(tensors[0].dtype), self.tp, self.pp)
        return ranks.write(file, tensors, {**args, "transformer_impl": self.implementation})

    def finish(self, work: Path, files: Files, entries: Entries) -> list[str]:
        """Nothing belongs beside them."""
        for name in files:
            sync_directory((work / name).parent)
        return [_NO_TOKENIZER]

    def publish(self, work: Path, destination: Path) -> None:
        """A release, and the tracker file that names it."""
        _release(work, destination)


def _release(work: Path, destination: Path) -> None:
    destination.mkdir()
    os.replace(work, destination / "release")
    write_extra(destination, TRACKER, b"release")
    sync_directory(destination)


def megatron_target(
    opened: Opened, dtype: torch.dtype | None, file_bytes: int, layout: tuple[int, int], options: Mapping[str, str]
) -> Dist | Ranks:
    """The one that `ckpt_format` in `options` names; empty means that of a Megatron source, else `torch_dist`."""
    kind = options.get("ckpt_format") or getattr(getattr(opened.source, "scanned", None), "format", "torch_dist")
    if kind == "torch":
        return Ranks(opened, dtype, *layout, options.get("saver_transformer_impl") or "transformer_engine")
    return Dist(opened, dtype, file_bytes, *layout)
