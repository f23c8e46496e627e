"""Activations in host memory: what a block keeps for its backward goes there while the next block computes, and comes
back while the backward of the block behind it does.

It works on storages: views that are kept of one tensor (queries, keys and values of one product) travel once and come
back with the strides that they had, so every number is bitwise what it was. Weights stay, and so does what all blocks
share (angles). On the CPU the same code copies from host memory to host memory, which saves nothing and tests it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isotron.core import device as devices
from isotron.core.mapped import Disk, Files
from isotron.core.nn.context import Context


class Kept:
    """The bytes of one storage. `source` is held until they have been copied."""

    def __init__(self, unit: Unit, source: Tensor, files: Files | None) -> None:
        self.unit, self.device = unit, source.device
        self.source: Tensor | None = source
        self._disk: Disk | None = None
        if files is None:
            self.host = devices.host_bytes(source.numel(), source.device)
        else:
            self._disk, self.host = files.take(source.numel())
            weakref.finalize(self, files.give_back, (self._disk, self.host)).atexit = False
        self._copied = devices.start_copies([(self.host, source)], source.device)
        self.back: Tensor | None = None
        self._arrived: Callable[[], None] | None = None

    def settle(self) -> None:
        """The copy is over; the device's memory is free."""
        if self.source is not None:
            self._copied()
            self.source = None
            if self._disk is not None:
                self._disk.leave()

    def read_ahead(self) -> None:
        """Bytes in a file begin to be read."""
        if self._disk is not None and self.source is None and self.back is None:
            self._disk.fetch()

    def fetch(self) -> None:
        """Start to bring the bytes back, unless that has been done."""
        if self.back is None:
            self.settle()
            self.back = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            self._arrived = devices.start_copies([(self.back, self.host)], self.device)

    def bytes(self) -> Tensor:
        """The bytes on the device."""
        self.unit.reached()
        self.fetch()
        if self._arrived is not None:
            self._arrived()
            self._arrived = None
        if self.back is None:
            raise RuntimeError("bytes that were sent for did not come back")
        return self.back


@dataclass(frozen=True)
class View:
    """A tensor on a storage that is kept."""

    kept: Kept
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """It, on the device."""
        flat = self.kept.bytes().view(self.dtype) if self.dtype != torch.uint8 else self.kept.bytes()
        return flat.as_strided(self.size, self.stride, self.offset)


class Unit:
    """What one block keeps in one forward. `before`: the block before it, whose bytes are wanted next."""

    def __init__(self, before: Unit | None, files: Files | None = None) -> None:
        self.before, self._files, self._asked = before, files, False
        self._kept: dict[tuple[int, int], weakref.ref[Kept]] = {}

    def keep(self, x: Tensor) -> View:
        """x, its storage once for all views of it."""
        storage = x.untyped_storage()
        key = storage._cdata, x._version
        reference = self._kept.get(key)
        kept = None if reference is None else reference()
        if kept is None:
            source = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            kept = Kept(self, source, self._files)
            self._kept[key] = weakref.ref(kept)
        return View(kept, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def alive(self) -> Iterable[Kept]:
        """What somebody still wants."""
        return [kept for reference in self._kept.values() if (kept := reference()) is not None]

    def settle(self) -> None:
        """Everything of it is in host memory."""
        for kept in self.alive():
            kept.settle()

    def reached(self) -> None:
        """The backward has come to it: what the block before it keeps starts to come back, and what the one before
        that has in files is read.
        """
        if self._asked or self.before is None:
            return
        self._asked = True
        for kept in self.before.alive():
            kept.fetch()
        for kept in () if self.before.before is None else self.before.before.alive():
            kept.read_ahead()


class HostActivations:
    """Socket `offloading` of a decoder: the first `blocks` blocks of its stage keep their activations on the host, or
    in files of a directory.
    """

    def __init__(self, blocks: int, directory: str = "") -> None:
        self.blocks = blocks
        self._files = Files(directory) if directory else None
        self.last: Unit | None = None

    def __call__(self, place: int, modules: Iterable[nn.Module], ctx: Context) -> AbstractContextManager[Any]:
        """Around the forward of the unit of blocks that begins with number `place` of the stage."""
        if place == 0:
            self.last = None
        self._leave_behind()
        if place >= self.blocks:
            return nullcontext()
        unit = self.last = Unit(self.last, self._files)
        stays = _storages(p for module in modules for p in module.parameters()) | _shared(ctx)

        def pack(x: Tensor) -> Tensor | View:
            here = x.untyped_storage()
            return x if not here.nbytes() or here._cdata in stays else unit.keep(x)

        def unpack(packed: Tensor | View) -> Tensor:
            return packed.tensor() if isinstance(packed, View) else packed

        return saved_tensors_hooks(pack, unpack)

    def _leave_behind(self) -> None:
        """Copies of the block before the last one are waited for, while the last one's go on."""
        if self.last is not None and self.last.before is not None:
            self.last.before.settle()


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors}


def _shared(ctx: Context) -> set[int]:
    batch = ctx.batch
    angles = (t for pair in (ctx.rope, ctx.local_rope) if pair is not None for t in pair)
    given = (batch.tokens, batch.labels, batch.loss_mask, batch.positions, batch.sample_ids)
    return _storages((*angles, *given))
