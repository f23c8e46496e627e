"""Load a checkpoint into any layout: whoever wants regions of tensors gets them from whatever chunks hold them.

Only the parts of the files that are asked for are read, through memory maps of a few files at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from isotron.core.checkpoint.cover import lies_inside, region_text
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.format import DTYPES, Chunk, Entry, Manifest
from isotron.core.checkpoint.locate import file_inside, verify_files
from isotron.core.errors import Problem, Refused, listed, refuse
from isotron.core.layout import Box, Ints

OPEN_FILES = 8


class TensorSource(Protocol):
    """Tensors by global name, readable region by region: a checkpoint here, foreign formats elsewhere."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and global shape."""

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy region `box` into `out`, which has the box's shape."""


class Source:
    """The tensors of one step directory.

    Opening it checks the manifest and the sizes of all files, unless a checked `manifest` is given; `manifest` is then
    at hand. Hashes are for `locate.verify_files`.
    """

    def __init__(self, path: str | Path, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest = verify_files(self.path, hashes=False) if manifest is None else manifest
        self._open: OrderedDict[str, Any] = OrderedDict()

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.manifest.tensors)

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and global shape of a tensor."""
        entry = self._entry(name)
        dtype = getattr(torch, entry.dtype, None)
        if dtype is None:
            raise self._refuse(f"tensor {name!r} has dtype {entry.dtype}, which torch {torch.__version__} lacks")
        return dtype, entry.shape

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy region `box` of a tensor into `out`, which has the box's shape; floating-point dtypes are converted."""
        dtype, shape = self.info(name)
        if not lies_inside(box, shape):
            raise self._refuse(f"region {region_text(box)} does not lie inside {name!r} of shape {list(shape)}")
        if tuple(out.shape) != box.shape:
            raise self._refuse(f"region {region_text(box)} of {name!r} does not fit into shape {list(out.shape)}")
        if not _converts(dtype, out.dtype):
            raise self._refuse(f"tensor {name!r} is {dtype_name(dtype)}, {dtype_name(out.dtype)} cannot hold it")
        copied = 0
        for chunk in self._entry(name).chunks:
            common = chunk.box.overlap(box)
            if common is not None:
                part = self._slice(name, chunk, common.relative_to(chunk.box))
                out[common.relative_to(box).slices()].copy_(part)
                copied += common.size
        if copied != box.size:
            raise self._refuse(f"{copied} of {box.size} elements of region {region_text(box)} of {name!r} were found")

    def close(self) -> None:
        """Unmap all files; reading maps them again."""
        self._open.clear()

    def _entry(self, name: str) -> Entry:
        if name not in self.manifest.tensors:
            raise self._refuse(f"it holds no tensor {name!r}")
        return self.manifest.tensors[name]

    def _slice(self, name: str, chunk: Chunk, inside: Box) -> torch.Tensor:
        """Region `inside` of a chunk; the file must agree with the manifest about dtype and shape."""
        try:
            file = self._file(chunk.file)
            stored = file.get_slice(chunk.key)
            found = stored.get_dtype(), tuple(stored.get_shape())
            expected = DTYPES[self._entry(name).dtype][0], chunk.box.shape
            if found == expected:
                part: torch.Tensor = stored[inside.slices()] if inside.shape else file.get_tensor(chunk.key)
                return part
        except (SafetensorError, OSError) as error:
            raise self._refuse(f"file {chunk.file} is damaged: key {chunk.key!r} cannot be read: {error}") from error
        raise self._refuse(f"file {chunk.file} is damaged: key {chunk.key!r} should be {expected}, found {found}")

    def _file(self, file: str) -> Any:
        """The mapped file; the one that was used longest ago is let go, so that mapped memory stays bounded."""
        if file not in self._open:
            while len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)
            self._open[file] = safe_open(file_inside(self._place(file), file), framework="pt")
        self._open.move_to_end(file)
        return self._open[file]

    def _place(self, file: str) -> Path:
        """The directory of a file."""
        return self.path

    def _refuse(self, case: str) -> Refused:
        fix = "load tensors as its manifest.json lists them (names, shapes, dtypes), or load another step"
        return refuse(f"load from the checkpoint {self.path}", case, fix)


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Floating point becomes any floating point; integers and booleans stay what they are, for a cast could wrap."""
    return source == target or (source.is_floating_point and target.is_floating_point)


@dataclass(frozen=True)
class Wanted:
    """Regions of one tensor and where they go; `shape` is the whole tensor's, if the caller knows it."""

    name: str
    pieces: list[tuple[Box, torch.Tensor]]
    shape: Ints | None = None


@dataclass(frozen=True)
class Loaded:
    """What `load_tensors` did not find, and what it left in the checkpoint, beyond what the caller ignores."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_tensors(
    source: TensorSource,
    wanted: Iterable[Wanted],
    strict: bool = True,
    ignore: Callable[[str], bool] | None = None,
    known: Iterable[str] = (),
    advice: str = "",
) -> Loaded:
    """Fill all wanted regions; every name or shape that does not match is reported in one refusal, before any copy.

    Tensors of the source that nobody wants are unexpected, unless `ignore(name)` or the name is in `known`, the names
    of the whole model where this rank wants only its part. Not `strict`: what is missing or unexpected is returned
    instead of refused, and missing tensors keep their values; shapes must match all the same. `advice`: what to do
    where names or shapes do not match, for models that are no config's.
    """
    wanted = list(wanted)
    present, asked_for = set(source.names()), {w.name for w in wanted}
    missing = tuple(sorted(asked_for - present))
    left = present - asked_for - set(known)
    unexpected = tuple(sorted(n for n in left if ignore is None or not ignore(n)))
    problems = _shape_problems(source, (w for w in wanted if w.name in present))
    if strict:
        problems = _name_problems(missing, unexpected) + problems
    if problems:
        raise Refused([replace(p, fix=advice or p.fix) for p in problems])
    for want in wanted:
        if want.name in present:
            for box, out in want.pieces:
                source.read(want.name, box, out)
    return Loaded(missing, unexpected)


def _name_problems(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> list[Problem]:
    problems = []
    if missing:
        case = f"the checkpoint lacks {len(missing)} of them: {listed(missing)}"
        fix = "load a checkpoint of this model, with the names that its manifest.json lists"
        problems.append(Problem("load all tensors of this model", case, fix))
    if unexpected:
        case = f"the model has no place for {len(unexpected)} of them: {listed(unexpected)}"
        fix = "load into the model that was saved, or load weights only"
        problems.append(Problem("load every tensor of the checkpoint", case, fix))
    return problems


def _shape_problems(source: TensorSource, wanted: Iterable[Wanted]) -> list[Problem]:
    """One problem that lists every tensor whose global shape differs or whose regions lie outside; or none."""
    cases = []
    for want in wanted:
        shape = source.info(want.name)[1]
        if want.shape is not None and tuple(want.shape) != shape:
            cases.append(f"{want.name} has shape {list(shape)} in the checkpoint and {list(want.shape)} in the model")
            continue
        outside = [region_text(box) for box, _ in want.pieces if not lies_inside(box, shape)]
        if outside:
            cases.append(f"{want.name} has shape {list(shape)} in the checkpoint, the model wants {listed(outside)}")
    if not cases:
        return []
    fix = "use the sizes of the checkpoint's model config (meta in its manifest.json)"
    return [Problem("load tensors with the shapes of this model", listed(cases, "; "), fix)]
