"""Optimizer state in host memory or on disk: where it is kept, and how gradients get there and weights back.

What is stepped on the host goes in groups of about `GROUP` elements. While one group is stepped, the gradients of the
next one travel, and its state is read ahead where that is on disk; weights go back at once. On a machine without an
accelerator the same happens from memory to memory, and changes no bit.

State on disk is one file per group (`core/mapped.py`), whose pages may go when the group has been stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isotron.core import device as devices
from isotron.core.mapped import Disk
from isotron.core.parallel.data import View

GROUP = 1 << 24  # elements


class Memory:
    """Host memory for the state of a group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor."""
        return devices.host_zeros(shape, dtype, self._device)

    def fetch(self) -> None:
        """It is there."""

    def leave(self) -> None:
        """It stays."""


@dataclass(frozen=True)
class Group:
    """Views that are stepped together, by their places, and where their state is."""

    places: tuple[int, ...]
    home: Memory | Disk


class Arrived:
    """Gradients of a group on the host, and its weights where they are their own masters."""

    def __init__(self, grads: list[Tensor], weights: list[Tensor | None], wait: Callable[[], None]) -> None:
        self.grads, self.weights, self.wait = grads, weights, wait


class Courier:
    """Copies of gradients and weights on the host, in two buffers that take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None, None]
        self._turn = 0

    def send(self, views: Sequence[View]) -> Arrived:
        """Begin to copy the gradients that are not there, and those weights that have no master of their own."""
        dtype = views[0].wide
        without = [not v.hosted and v.weight.dtype == dtype for v in views]
        counts = [int(w) + int(not v.hosted_grad) for v, w in zip(views, without, strict=True)]
        sizes = [v.box.size for v, count in zip(views, counts, strict=True) for _ in range(count)]
        places = list(self._room(sum(sizes), dtype).split(sizes))
        grads, weights = [], list[Tensor | None]()
        pairs = []
        for view, alone in zip(views, without, strict=True):
            grads.append(view.grad if view.hosted_grad else places.pop(0))
            weights.append(places.pop(0) if alone else None)
            if not view.hosted_grad:
                pairs.append((grads[-1], view.grad))
            if weights[-1] is not None:
                pairs.append((weights[-1], view.weight))
        return Arrived(grads, weights, devices.start_copies(pairs, self._device))

    def _room(self, size: int, dtype: torch.dtype) -> Tensor:
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[self._turn] = devices.host_zeros((size,), dtype, self._device)
        return buffer[:size]


def grouped(
    places: Sequence[int], sizes: Sequence[int], needs: Callable[[int], int], directory: str, device: torch.device
) -> list[Group]:
    """Views in groups of about `GROUP` elements, each with a home for its state, of which view i needs `needs(i)` bytes
    at most.
    """
    runs: list[list[int]] = []
    for i in places:
        if not runs or sum(sizes[j] for j in runs[-1]) + sizes[i] > GROUP:
            runs.append([])
        runs[-1].append(i)
    homes = (Disk(directory, sum(map(needs, run))) if directory else Memory(device) for run in runs)
    return [Group(tuple(run), home) for run, home in zip(runs, homes, strict=True)]
