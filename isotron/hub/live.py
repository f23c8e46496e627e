"""A model in memory, cut over ranks, to and from Hugging Face's names: for serving, reinforcement learning, saving.

model = from_hf("path/to/model", layout, mesh)        # every rank calls it; reads its own part only
for name, tensor in stream(model): ...                # every rank calls it; every rank gets whole tensors
to_hf(model, "path/to/result", like="path/to/model")  # every rank calls it; the first one writes
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.checkpoint.disk import sync_directory, write_extra
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.weights import load_weights
from isotron.core.errors import refuse
from isotron.core.layout import Box, Ints
from isotron.core.mesh import AXES, Mesh
from isotron.core.models.hf_names import Mapped
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub import export
from isotron.hub.families import spelling_of
from isotron.hub.folder import CONFIG, Folder, companions, open_folder
from isotron.hub.locate import local_path
from isotron.hub.reader import HFSource, their_shapes
from isotron.hub.writer import Planned, deal, write_planned


def from_hf(
    path: str | Path,
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 1234,
) -> ParallelModel:
    """The model of a Hugging Face directory (or ORG/NAME) in a layout; each rank reads its own part.

    `dtype`: the directory's by default. Refuses what does not match, on every rank alike.
    """
    folder = open_folder(local_path(str(path)))
    layout, mesh = layout or Layout(dp=1), mesh or Mesh()
    kind: torch.dtype = dtype or getattr(torch, folder.dtype)
    model = ParallelModel(folder.model, layout, mesh, kind, torch.device(device), seed)
    source = HFSource(folder, check_head=mesh.rank == 0)
    load_weights(model, source)
    source.close()
    return model


def stream(model: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) in Hugging Face's names, bitwise the weights as they are, one tensor after another.

    Collective: every rank takes every item, before the weights change. Memory: one of our tensors at a time.
    """
    live = _Live(model)
    for mapped in _in_order(model):
        ours = live.whole(mapped.ours)
        for name, shape in their_shapes(mapped, tuple(ours.shape)).items():
            yield name, export.made(_One(mapped.ours, ours), mapped, name, shape, ours.dtype)


class _Live:
    """Whole tensors of a model that is cut over ranks."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.pieces: dict[str, list[tuple[Box, Tensor]]] = {}
        for name, _, pieces in (*model.weight_pieces(), *model.buffer_pieces()):
            self.pieces.setdefault(name, []).extend(pieces)
        cfg = model.config
        self.table = cfg.layout(model.layout.padded_vocab(cfg.vocab_size))
        self.group = model.mesh.group(*AXES)

    def whole(self, name: str) -> Tensor:
        """The tensor on the CPU of every rank; collective. Bytes are added to zeros, so nothing is rounded."""
        shape = self.table.rule(name).shape
        dtype = self.model.wide if self.table.rule(name).buffer else self.model.dtype
        full = torch.zeros(shape, dtype=dtype, device=self.model.device)
        for box, values in self.pieces.get(name, []):
            full[box.slices()] = values
        comm.all_reduce(full.view(torch.uint8), self.group)
        return full.cpu()


class _One:
    """A `TensorSource` of one tensor in memory."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor

    def names(self) -> list[str]:
        """Its name."""
        return [self.name]

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and shape."""
        return self.tensor.dtype, tuple(self.tensor.shape)

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Copy a region."""
        out.copy_(self.tensor[box.slices()])


def to_hf(model: ParallelModel, path: str | Path, like: str | Path = "", file_bytes: int = export.SHARD_BYTES) -> Path:
    """Write the weights as they are, with config.json, as a Hugging Face directory; collective, the first rank writes.

    `like`: the directory that the model came from; its tokenizer, generation config and further fields are copied.
    """
    target = Path(path).expanduser()
    group = model.mesh.group(*AXES)
    blocked = comm.broadcast_json(target.exists() and any(target.iterdir()), group)
    if blocked:
        raise refuse(
            f"write a model to {target}", "it exists, and nothing is overwritten", "a directory that does not exist"
        )
    tensors = stream(model)
    failure: Exception | None = None
    try:
        if group.index == 0:
            _write(model, tensors, target, open_folder(local_path(str(like))) if like else None, file_bytes)
        for _ in tensors:  # the other ranks take part in every item; so does the first one when it could not write
            pass
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
        for _ in tensors:
            pass
    said = comm.broadcast_json(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if said is not None:
        fix = "remove the cause and write again; nothing has taken the name of the result"
        raise failure or refuse(f"write a model to {target}", said, fix, exit_code=1)
    return target


def _write(
    model: ParallelModel, tensors: Iterator[tuple[str, Tensor]], target: Path, origin: Folder | None, file_bytes: int
) -> None:
    """What the first rank does: files of tensors as they come, then all that belongs to them, then the name."""
    files = deal(_planned(model), file_bytes)
    named = dict(zip(export.shard_names(len(files)), files, strict=True))
    work = target.with_name(target.name + ".partial")
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    for name, plan in named.items():
        write_planned(work / name, [Planned(p.key, p.dtype, p.shape, _next(tensors, p.key)) for p in plan])
    extras = export.extra_files(companions(origin.path) if origin else [], {})
    kept, dtype = (origin.values if origin else None), dtype_name(model.dtype)
    extras[CONFIG] = export.config_text(model.config, spelling_of(model.config.family), dtype, kept, {})
    if len(named) > 1:
        extras[export.INDEX] = export.index_text(named)
    for name, content in extras.items():
        write_extra(work, name, content)
    sync_directory(work)
    if target.exists():
        target.rmdir()
    work.rename(target)


def _planned(model: ParallelModel) -> list[Planned]:
    """What `stream` will give, in its order."""
    cfg = model.config
    table = cfg.layout(cfg.vocab_size)
    found = []
    for mapped in _in_order(model):
        rule = table.rule(mapped.ours)
        ours, dtype = rule.shape, model.wide if rule.buffer else model.dtype
        found += [Planned(name, dtype, shape, _never) for name, shape in their_shapes(mapped, ours).items()]
    return found


def _in_order(model: ParallelModel) -> list[Mapped]:
    """All tensors, the wide ones first: the order in which a file of several types is written."""
    table = model.config.layout(model.config.vocab_size)
    return sorted(spelling_of(model.config.family).tensors(model.config), key=lambda m: not table.rule(m.ours).buffer)


def _never() -> Tensor:
    raise RuntimeError("a plan has no tensor")


def _next(tensors: Iterator[tuple[str, Tensor]], key: str) -> Callable[[], Tensor]:
    def make() -> Tensor:
        name, tensor = next(tensors)
        if name != key:
            raise RuntimeError(f"{name} came where {key} was planned")
        return tensor

    return make
