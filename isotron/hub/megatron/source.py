"""The tensors of a Megatron checkpoint under our names: a `TensorSource` that reads only what is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isotron.core.checkpoint.cover import cover_error
from isotron.core.checkpoint.format import DTYPES
from isotron.core.errors import Problem, Refused
from isotron.core.layout import Box, Ints
from isotron.hub import folder
from isotron.hub.files import OpenFiles
from isotron.hub.megatron.args import read_config
from isotron.hub.megatron.ask import Scanned, scan, step_directory
from isotron.hub.megatron.names import VOCABULARY, tensors
from isotron.hub.megatron.stored import Stored
from isotron.hub.reader import read_region


class MegatronSource:
    """Opening it matches every tensor of the checkpoint with one of the model, by name and shape, or refuses.

    `vocab_size`: real entries of a vocabulary that is padded; 0 means what the arguments of the run say.
    """

    def __init__(self, path: str | Path, vocab_size: int = 0) -> None:
        self._files = OpenFiles()
        self.scanned: Scanned = scan(step_directory(path).resolve())
        self.where = f"the Megatron checkpoint {path}"
        model = read_config(self.scanned.args, self.where)
        self.model: Any = replace(model, vocab_size=vocab_size) if vocab_size else model
        self.mapped = {m.ours: m for m in tensors(self.model)}
        table = self.model.layout(self.model.vocab_size)
        self.shapes: dict[str, Ints] = {name: table.rule(name).shape for name in self.mapped}
        self._match()

    @property
    def dtype(self) -> str:
        """torch's name of the dtype of the weights."""
        return self.scanned.tensors[self.mapped["embed.weight"].runs[0].theirs].dtype

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that hold a part of the weights."""
        return tuple(sorted({c.file for s in self.scanned.tensors.values() for c in s.chunks}))

    # ---- the protocol of checkpoints -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Our names of all tensors."""
        return list(self.mapped)

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and shape."""
        stored = self.scanned.tensors[self.mapped[name].runs[0].theirs]
        return getattr(torch, stored.dtype), self.shapes[name]

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Copy region `box` of our tensor into `out`."""
        start = 0
        for run in self.mapped[name].runs:
            ours = Box((start, *box.offset[1:]), (run.count, *box.shape[1:]))
            start += run.count
            common = ours.overlap(box)
            if common is None:
                continue
            first = run.first + common.offset[0] - ours.offset[0]
            region = Box((first, *common.offset[1:]), common.shape)
            self._read(self.scanned.tensors[run.theirs], region, out[common.relative_to(box).slices()])

    def _read(self, stored: Stored, region: Box, out: Tensor) -> None:
        code, width = DTYPES[stored.dtype]
        for chunk in stored.chunks:
            common = chunk.box.overlap(region)
            if common is not None:
                length = chunk.box.size * width
                part = folder.Stored(chunk.file, code, chunk.box.shape, chunk.start, chunk.start + length)
                inside = common.relative_to(chunk.box)
                read_region(self._files[chunk.file], part, inside, out[common.relative_to(region).slices()])

    def close(self) -> None:
        """Close all files; reading opens them again."""
        self._files.close()

    # ---- what must hold --------------------------------------------------------------------------------------------

    def _match(self) -> None:
        """Every tensor exactly once, with its shape and all of its parts; what is wrong in one refusal."""
        stored = self.scanned.tensors
        wanted = {m.runs[0].theirs: self.shapes[m.ours] for m in self.mapped.values()}
        missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        wrong = [text for name in wanted.keys() & stored.keys() for text in _faults(name, wanted[name], stored[name])]
        problems = []
        fix = "a complete copy, written by the run whose arguments it keeps"
        if missing:
            problems.append(Problem(self.where, f"{len(missing)} tensors are missing: {', '.join(missing)}", fix))
        if unknown:
            case = f"the model has no place for {len(unknown)} tensors: {', '.join(unknown)}"
            problems.append(Problem(self.where, case, fix))
        if wrong:
            problems.append(Problem(self.where, "; ".join(sorted(wrong)), fix))
        if problems:
            raise Refused(problems)


def _faults(name: str, wanted: Ints, stored: Stored) -> list[str]:
    """What is wrong with one tensor."""
    padded = name in VOCABULARY and stored.shape[1:] == wanted[1:] and stored.shape[0] >= wanted[0]
    if stored.shape != wanted and not padded:
        return [f"{name} has shape {list(stored.shape)}, the arguments say {list(wanted)}"]
    if stored.dtype not in DTYPES or not stored.dtype.startswith(("float", "bfloat")):
        return [f"{name} has dtype {stored.dtype}"]
    hole = cover_error(stored.shape, [(c.box, c.file.name) for c in stored.chunks])
    if hole:
        return [f"{name}: {hole}"]
    width = DTYPES[stored.dtype][1]
    short = [c.file.name for c in stored.chunks if c.file.stat().st_size < c.start + c.box.size * width]
    return [f"{name} would end beyond {short[0]}"] if short else []
