"""Multi-token prediction: modules behind the last block that each predict one token further.

Legend: B batch, S sequence (its local part), D hidden. Depth k (from 0) at position i sees the token i + k + 1 and the
output of the depth before (of the model, for the first), and predicts the token i + k + 2, through one more block and
the model's own embedding and output layer. Positions whose target lies beyond the row or in another document do not
count. Sources: Gloeckle et al. 2024; DeepSeek-AI 2024b (DeepSeek-V3), section 2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.nn.context import Context
from isotron.core.nn.linear import Linear
from isotron.core.nn.norm import RMSNorm


class Depth(nn.Module):
    """join(norm(embedding) | norm(hidden)) -> block -> norm."""

    def __init__(self, hidden: int, epsilon: float, block: nn.Module) -> None:
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(hidden, epsilon), RMSNorm(hidden, epsilon)
        self.join = Linear(2 * hidden, hidden)
        self.block = block
        self.norm = RMSNorm(hidden, epsilon)

    def forward(self, embedded_BSD: Tensor, hidden_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD, normed."""
        x = self.join(torch.cat((self.enorm(embedded_BSD), self.hnorm(hidden_BSD)), -1))
        x = self.norm(self.block(x, ctx))
        return x


class Predictions(nn.ModuleList):
    """All depths; their losses enter with `factor` / number of depths times a token's weight."""

    def __init__(self, depths: list[Depth], factor: float) -> None:
        super().__init__(depths)
        self.factor = factor

    def forward(self, x_BSD: Tensor, batch: Batch, ctx: Context, weight: float, embed: Any, head: Any) -> None:
        """Leaves `mtp/k` in `ctx.terms`. `x_BSD`: the model's output, normed."""
        for k, depth in enumerate(self):
            ids, labels, mask = ahead(batch, k)
            x_BSD = depth(embed(ids), x_BSD, ctx)
            share = weight * self.factor / len(self)
            if ctx.terms is not None:
                ctx.terms[f"mtp/{k}"] = head(x_BSD, labels, mask, share), share


def ahead(batch: Batch, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens k + 1 places ahead, their successors, and which of those count."""
    if batch.ahead is not None and batch.ahead_mask is not None:
        return batch.ahead[k], batch.ahead[k + 1], batch.ahead_mask[k]
    ids, labels, mask = (t.roll(-n, 1) for t, n in ((batch.labels, k), (batch.labels, k + 1), (batch.loss_mask, k + 1)))
    mask[:, mask.shape[1] - k - 1 :] = 0
    if batch.doc_ids is not None:
        mask = mask * (batch.doc_ids.roll(-k - 1, 1) == batch.doc_ids)
    return ids, labels, mask


def looked_ahead(rows: Batch, depths: int) -> Batch:
    """Whole rows with what all depths are given, so that they can be cut; as they are for a model without depths."""
    if not depths:
        return rows
    found = [ahead(rows, k) for k in range(depths)]
    labels = torch.stack([*(ids for ids, _, _ in found), found[-1][1]])
    return replace(rows, ahead=labels, ahead_mask=torch.stack([mask for _, _, mask in found]))
