"""Dropout whose mask is a function of (seed, place in the model, sample, position, feature).

Legend: B batch, S sequence, D hidden, H heads, T key positions. The same numbers come out in every layout, on any
device, and again in a recomputed forward. Sockets: `sequence` and `heads` = (index, count) of the local slice.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.random import keep_mask, key


class Dropout(nn.Module):
    """Keeps with probability 1 - p and scales by 1 / (1 - p); the identity in evaluation."""

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p, self.name, self.seed = p, name, 0
        self.sequence: tuple[int, int] = (0, 1)
        self.heads: tuple[int, int] = (0, 1)

    @property
    def active(self) -> bool:
        """Whether it changes anything now."""
        return self.training and self.p > 0

    def forward(self, x_BSD: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Drop elements of an activation whose S is the local part of the sequence."""
        if not self.active:
            return x_BSD
        _, s, d = x_BSD.shape
        at = torch.arange(s, device=x_BSD.device) + self.sequence[0] * s
        features = torch.arange(d, device=x_BSD.device)
        return self._drop(x_BSD, sample_ids_B[:, None, None], at[:, None], features)

    def on_probabilities(self, p_BHST: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Drop attention probabilities of the local heads."""
        if not self.active:
            return p_BHST
        _, h, s, t = p_BHST.shape
        device = p_BHST.device
        head = torch.arange(h, device=device) + self.heads[0] * h
        query, keys = torch.arange(s, device=device), torch.arange(t, device=device)
        return self._drop(p_BHST, sample_ids_B[:, None, None, None], head[:, None, None], query[:, None], keys)

    def _drop(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        keep = keep_mask(self.p, key(self.seed, self.name), *coordinates)
        return torch.where(keep, x * (1 / (1 - self.p)), 0.0)
