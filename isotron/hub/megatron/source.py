"""The tensors of a Megatron checkpoint under our names: a `TensorSource` that reads only what is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isotron.core.checkpoint.cover import cover_error
from isotron.core.checkpoint.format import DTYPES
from isotron.core.errors import Problem, Refused, listed
from isotron.core.layout import Box, Ints
from isotron.hub import folder
from isotron.hub.files import OpenFiles
from isotron.hub.megatron.args import read_config
from isotron.hub.megatron.ask import Scanned, scan, step_directory
from isotron.hub.megatron.names import VOCABULARY, tensors
from isotron.hub.megatron.state import prefixes, why_not
from isotron.hub.megatron.stored import Stored
from isotron.hub.reader import read_region


class MegatronSource:
    """Opening it matches every tensor of the checkpoint with one of the model, by name and shape, or refuses.

    `vocab_size`: real entries of a vocabulary that is padded; 0 means what the arguments of the run say. `state`: the
    optimizer's masters and moments too, as `master/NAME` and so on; `left_behind` says why there are none.
    """

    def __init__(self, path: str | Path, vocab_size: int = 0, state: bool = False) -> None:
        self._files = OpenFiles()
        self.scanned: Scanned = scan(step_directory(path).resolve(), state)
        self.where = f"the Megatron checkpoint {path}"
        model = read_config(self.scanned.args, self.where)
        self.model: Any = replace(model, vocab_size=vocab_size) if vocab_size else model
        self.mapped = {m.ours: m for m in tensors(self.model)}
        table = self.model.layout(self.model.vocab_size)
        self.shapes: dict[str, Ints] = {name: table.rule(name).shape for name in self.mapped}
        self.left_behind = "it was not asked for"
        self._starts = {"": ""}  # kind of tensor -> how their names of it begin
        if state:
            found = self.scanned.tensors
            self.left_behind = why_not(self.scanned.state, found, self.scanned.args, self.dtype)
            self._starts |= {} if self.left_behind else prefixes(found)
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
        return [f"{kind}/{name}" if kind else name for kind in self._starts for name in self.mapped]

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and shape."""
        beginning, weight = self._part(name)
        stored = self.scanned.tensors[beginning + self.mapped[weight].runs[0].theirs]
        return getattr(torch, stored.dtype), self.shapes[weight]

    def _part(self, name: str) -> tuple[str, str]:
        """(how their names begin, our name of the weight) of a weight, or of a tensor of the optimizer's."""
        kind, slash, weight = name.partition("/")
        return (self._starts[kind], weight) if slash else ("", name)

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Copy region `box` of our tensor into `out`."""
        start, (beginning, weight) = 0, self._part(name)
        for run in self.mapped[weight].runs:
            ours = Box((start, *box.offset[1:]), (run.count, *box.shape[1:]))
            start += run.count
            common = ours.overlap(box)
            if common is None:
                continue
            first = run.first + common.offset[0] - ours.offset[0]
            region = Box((first, *common.offset[1:]), common.shape)
            self._read(self.scanned.tensors[beginning + run.theirs], region, out[common.relative_to(box).slices()])

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
        stored = {
            n: t for n, t in self.scanned.tensors.items() if len(self._starts) > 1 or not n.startswith("optimizer.")
        }
        wanted = {
            start + m.runs[0].theirs: self.shapes[m.ours]
            for start in self._starts.values()
            for m in self.mapped.values()
        }
        missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        wrong = [text for name in wanted.keys() & stored.keys() for text in _faults(name, wanted[name], stored[name])]
        problems = []
        fix = "a complete copy, written by the run whose arguments it keeps"
        if missing:
            problems.append(Problem(self.where, f"{len(missing)} tensors are missing: {listed(missing)}", fix))
        if unknown:
            case = f"the model has no place for {len(unknown)} tensors: {listed(unknown)}"
            problems.append(Problem(self.where, case, fix))
        if wrong:
            problems.append(Problem(self.where, listed(sorted(wrong), "; "), fix))
        if problems:
            raise Refused(problems)


def _faults(name: str, wanted: Ints, stored: Stored) -> list[str]:
    """What is wrong with one tensor."""
    padded = name.endswith(VOCABULARY) and stored.shape[1:] == wanted[1:] and stored.shape[0] >= wanted[0]
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
