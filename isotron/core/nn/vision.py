"""Pictures into vectors: patches with their places, and what makes a tower's vectors as wide as a text's.

Legend: I pictures of a batch, P patches of a picture, C numbers of a patch, V width of the tower, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import gelu

from isotron.core.nn.attention import given
from isotron.core.nn.linear import Linear
from isotron.core.nn.norm import LayerNorm


class Patches(nn.Module):
    """A vector for each patch, a class token before them, a learned place for each, and a norm."""

    def __init__(self, pixels: int, patches: int, width: int, eps: float) -> None:
        super().__init__()
        self.patch = Linear(pixels, width)
        self.class_token = nn.Parameter(torch.empty(width))
        self.places = nn.Parameter(torch.empty(patches + 1, width))
        self.norm = LayerNorm(width, eps)

    def forward(self, images_IPC: Tensor) -> Tensor:
        """[I, 1 + P, V]."""
        x_IPV = self.patch(images_IPC.to(self.patch.weight.dtype))
        first_I1V = given(self.class_token).expand(len(x_IPV), 1, -1)
        y: Tensor = self.norm(torch.cat((first_I1V, x_IPV), 1) + given(self.places))
        return y


class Projector(nn.Module):
    """Two layers around a GELU; the class token is left out."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden, bias=True)
        self.down = Linear(hidden, hidden, bias=True)

    def forward(self, x_IQV: Tensor) -> Tensor:
        """[I, P, D] of [I, 1 + P, V]."""
        y: Tensor = self.down(gelu(self.up(x_IQV[:, 1:])))
        return y


def patches_of(images: Tensor, side: int) -> Tensor:
    """[I, P, C] of pictures [I, colours, H, W]: patches of `side` pixels row by row, colours first in each."""
    i, colours, height, width = images.shape
    cut = images.view(i, colours, height // side, side, width // side, side)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(i, -1, colours * side * side)
