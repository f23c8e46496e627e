"""Host buffers that tensors are copied into before a save in the background, kept from one save to the next.

A first touch of memory costs as much as the copy itself, so the buffers of the last save serve again as long as they
fit. Memory that a device can copy into directly is asked for where there is a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isotron.core import device as devices
from isotron.core.checkpoint.save import Saved
from isotron.core.layout import Box

ALIGN = 64


class Buffers:
    """One flat buffer of host memory per process, cut anew for every save."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        return self._flat.numel()

    def lay_out(self, tensors: Sequence[Saved]) -> list[Saved]:
        """The same tensors with places in the buffer, to be filled by `copy`; nothing is copied yet."""
        sizes = [[_rounded(t.numel() * t.element_size()) for _, t in saved.pieces] for saved in tensors]
        total = sum(map(sum, sizes))
        if total > self._flat.numel():
            self._flat = torch.empty(0, dtype=torch.uint8)  # let go of the old one first
            device = next((t.device for saved in tensors for _, t in saved.pieces), torch.device("cpu"))
            self._flat = devices.host_buffer(total, device)
        self._pairs, at, placed = [], 0, []
        for saved, widths in zip(tensors, sizes, strict=True):
            pieces: list[tuple[Box, Tensor]] = []
            for (box, tensor), width in zip(saved.pieces, widths, strict=True):
                used = tensor.numel() * tensor.element_size()
                place = self._flat[at : at + used].view(tensor.dtype).view(tensor.shape)
                pieces.append((box, place))
                self._pairs.append((place, tensor))
                at += width
            placed.append(Saved(saved.name, saved.dtype, saved.global_shape, pieces))
        return placed

    def copy(self) -> None:
        """Fill the places; when it returns, the tensors may change."""
        on_device = [(place, tensor) for place, tensor in self._pairs if devices.is_cuda(tensor.device)]
        for place, tensor in self._pairs:
            if not devices.is_cuda(tensor.device):
                # numpy's copy goes past the caches (half the time of torch's) and lets other threads run
                np.copyto(_bytes(place), _bytes(tensor)) if tensor.is_contiguous() else place.copy_(tensor)
        devices.copy_to_host(on_device)
        self._pairs = []


def _rounded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _bytes(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found
