"""Relative position bias: a number per head and bucket of distances, added to attention scores.

Legend: H heads held here, S queries, T keys. Source: Raffel et al. 2020 (T5), section 2.1: half of the buckets of a
direction stand for one distance each, the other half for ranges that grow logarithmically up to a largest distance.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.nn.embedding import looked_up


class RelativeBias(nn.Module):
    """W[bucket of key - query], one table for all blocks of an encoder or of a decoder.

    `causal`: keys come no later than queries, so all buckets are for what came before.
    """

    def __init__(self, buckets: int, heads: int, farthest: int, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        self.farthest, self.causal = farthest, causal

    def forward(self, positions_T: Tensor, queries: int = 0) -> Tensor:
        """bias_HST of keys at these positions, and of queries at the last `queries` of them, 0 for all."""
        apart_ST = positions_T[None, :] - positions_T[-queries:, None]
        ids_ST = bucket(apart_ST, self.weight.shape[0], self.farthest, self.causal)
        return looked_up(ids_ST, self.weight).permute(2, 0, 1)


def bucket(apart: Tensor, buckets: int, farthest: int, causal: bool) -> Tensor:
    """The bucket of each distance key - query, int64 of the same shape."""
    later = torch.zeros_like(apart)
    if causal:
        distance = (-apart).clamp_min(0)
    else:
        buckets //= 2
        later, distance = (apart > 0) * buckets, apart.abs()
    exact = buckets // 2
    # in float32 and in this order, as in the published models: a distance on the border of two buckets stays in its own
    grown = torch.log(distance.float().clamp_min(1) / exact) / math.log(farthest / exact) * (buckets - exact)
    far = (exact + grown.long()).clamp_max(buckets - 1)
    return later + torch.where(distance < exact, distance, far)
