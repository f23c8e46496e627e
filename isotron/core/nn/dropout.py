"""Dropout whose mask is a function of (seed, place in the model, sample, position, feature).

Legend: B batch, S sequence, D hidden, H heads, T key positions. The same numbers come out in every layout, on any
device, and again in a recomputed forward. Sockets: `sequence` and `heads` = (index, count) of the local slice;
`context` = (index, count) of the zigzag part of every row that the sequence is, before `sequence` cuts it. Where
documents were laid into new rows, each token's own sample and slot are the key.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Origin, Places
from isotron.core.random import keep_mask, key
from isotron.core.rows import slots, zigzag


class Dropout(nn.Module):
    """Keeps with probability 1 - p and scales by 1 / (1 - p); the identity in evaluation."""

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p, self.name, self.seed = p, name, 0
        self.sequence: tuple[int, int] = (0, 1)
        self.context: tuple[int, int] = (0, 1)
        self.heads: tuple[int, int] = (0, 1)

    @property
    def active(self) -> bool:
        """Whether it changes anything now."""
        return self.training and self.p > 0

    def forward(self, x_BSD: Tensor, places: Places) -> Tensor:
        """Drop elements of an activation whose S is the local part of the sequence."""
        if not self.active:
            return x_BSD
        _, s, d = x_BSD.shape
        features = torch.arange(d, device=x_BSD.device)
        if isinstance(places, Origin):
            own = slice(self.sequence[0] * s, (self.sequence[0] + 1) * s)
            return self._drop(x_BSD, places.samples_BS[:, own, None], places.slots_BS[:, own, None], features)
        return self._drop(x_BSD, places[:, None, None], self._slots(s, x_BSD.device)[:, None], features)

    def _slots(self, s: int, device: torch.device) -> Tensor:
        """Slots in their row of the s tokens held here."""
        index, count = self.sequence
        if self.context[1] == 1:
            return torch.arange(s, device=device) + index * s
        runs = zigzag(*self.context, s * count * self.context[1])
        return torch.tensor(slots(runs)[index * s : (index + 1) * s], device=device)

    def on_probabilities(
        self, p_BHST: Tensor, places: Places, query: int = 0, first_key: int = 0, rows: slice = slice(None)
    ) -> Tensor:
        """Drop attention probabilities of the local heads, all of one document where rows are new; `query` and
        `first_key` are the slots of the first ones, `rows` are those of the batch.
        """
        if not self.active:
            return p_BHST
        _, h, s, t = p_BHST.shape
        device = p_BHST.device
        head = torch.arange(h, device=device) + self.heads[0] * h
        if isinstance(places, Origin):
            samples = places.samples_S[query : query + 1].to(device)
            query, first_key = int(places.slots_S[query]), int(places.slots_S[first_key])
        else:
            samples = places[rows]
        queries, over = torch.arange(s, device=device) + query, torch.arange(t, device=device) + first_key
        return self._drop(p_BHST, samples[:, None, None, None], head[:, None, None], queries[:, None], over)

    def _drop(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        keep = keep_mask(self.p, key(self.seed, self.name), *coordinates)
        return torch.where(keep, x * (1 / (1 - self.p)), 0.0)
