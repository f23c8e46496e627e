"""Residual blocks with norms before attention and MLP, one after the other or side by side, dropout on both branches.

Legend: B batch, S sequence, D hidden. Families choose the norm, the attention and the MLP.
"""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor

from isotron.core.nn.attention import Attention
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout


class PreNormBlock(nn.Module):
    """`recompute` keeps the norms' and the activation's inputs only and computes their results again in the
    backward.
    """

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: Attention, mlp: nn.Module, dropout: float, name: str
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = norms[0], attention, norms[1], mlp
        self.attention_dropout = Dropout(dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(dropout, f"{name}.mlp")
        self.recompute = False

    def set_recompute(self, on: bool) -> None:
        """Selective recompute of this block's norms, activation and attention probabilities."""
        for part in (self, self.mlp, self.attention.core):
            part.recompute = on  # type: ignore[assignment]

    def forward(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD."""
        ids = ctx.batch.sample_ids
        if self.recompute:
            x = x_BSD + self.attention_dropout(self.attention(x_BSD, ctx, self.attention_norm), ids)
            return x + self.mlp_dropout(self.mlp(x, self.mlp_norm), ids)
        x = x_BSD + self.attention_dropout(self.attention(self.attention_norm(x_BSD), ctx), ids)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), ids)


class ParallelBlock(PreNormBlock):
    """x + attention(norm(x)) + mlp(norm'(x)): both branches read the same residual stream."""

    def forward(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD."""
        ids = ctx.batch.sample_ids
        if self.recompute:
            a, m = self.attention(x_BSD, ctx, self.attention_norm), self.mlp(x_BSD, self.mlp_norm)
        else:
            a, m = self.attention(self.attention_norm(x_BSD), ctx), self.mlp(self.mlp_norm(x_BSD))
        return x_BSD + self.attention_dropout(a, ids) + self.mlp_dropout(m, ids)


class ExpertBlock(PreNormBlock):
    """The MLP is a choice of experts, which sees the batch too."""

    def forward(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD."""
        ids = ctx.batch.sample_ids
        if self.recompute:
            x = x_BSD + self.attention_dropout(self.attention(x_BSD, ctx, self.attention_norm), ids)
        else:
            x = x_BSD + self.attention_dropout(self.attention(self.attention_norm(x_BSD), ctx), ids)
        return x + self.mlp_dropout(self.mlp(x, ctx, self.mlp_norm), ids)
