"""Attention of an encoder and of a decoder that looks at it: a bias on scores, padding, keys of another sequence.

Legend: B batch, S queries, T keys, E tokens of the encoder's sequence, D hidden, H heads held here, N head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.linear import Linear


@dataclass
class Streams(Context):
    """What the blocks of an encoder, or of a decoder, share in one forward pass.

    `bias_HST`: of the scores of self-attention. `unseen_B11E`: True at the padding of the encoder's sequence.
    `memory_BED`: what the encoder made of it, or the local part of that.
    """

    bias_HST: Tensor | None = None
    unseen_B11E: Tensor | None = None
    memory_BED: Tensor | None = None


class Scored(nn.Module):
    """Attention with explicit probabilities and scores that are not scaled. `causal`: each query meets itself and what
    came before. `biased`: the context's bias is added. `padded`: the keys are the encoder's, without their padding.
    """

    def __init__(self, dropout: Dropout, causal: bool = False, biased: bool = False, padded: bool = False) -> None:
        super().__init__()
        self.dropout, self.causal, self.biased, self.padded = dropout, causal, biased, padded
        self.recompute = False

    def forward(
        self, q_BHSN: Tensor, k_BHTN: Tensor, v_BHTN: Tensor, ctx: Streams, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_BHSN; without sinks."""
        if self.recompute:
            return checkpoint(self._over, q_BHSN, k_BHTN, v_BHTN, ctx, use_reentrant=False, preserve_rng_state=False)
        return self._over(q_BHSN, k_BHTN, v_BHTN, ctx)

    def _over(self, q: Tensor, k: Tensor, v: Tensor, ctx: Streams) -> Tensor:
        scores_BHST = q @ k.transpose(-1, -2)
        if self.biased and ctx.bias_HST is not None:
            scores_BHST = scores_BHST + ctx.bias_HST
        if self.causal:
            later = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores_BHST = scores_BHST.masked_fill(later, -torch.inf)
        if self.padded and ctx.unseen_B11E is not None:
            scores_BHST = scores_BHST.masked_fill(ctx.unseen_B11E, -torch.inf)
        p = torch.softmax(scores_BHST, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
        return self.dropout.on_probabilities(p, ctx.batch.sample_ids) @ v


class CrossAttention(nn.Module):
    """Queries of one sequence, keys and values of the encoder's."""

    def __init__(self, hidden: int, heads: int, head_size: int, dropout: Dropout) -> None:
        super().__init__()
        self.q = Linear(hidden, heads * head_size)
        self.kv = Linear(hidden, 2 * heads * head_size)
        self.out = Linear(heads * head_size, hidden)
        self.core = Scored(dropout, padded=True)
        self.head_size = head_size

    def forward(self, x_BSD: Tensor, ctx: Streams, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        q_BHSN = self._heads(self.q(x_BSD, pre))
        k_BHEN, v_BHEN = self.seen(ctx)
        return self.out(self.core(q_BHSN, k_BHEN, v_BHEN, ctx).transpose(1, 2).flatten(2))

    def seen(self, ctx: Streams) -> tuple[Tensor, Tensor]:
        """Keys and values of what the encoder gave."""
        if ctx.memory_BED is None:
            raise ValueError("cross-attention without what the encoder gave")
        k_BHEN, v_BHEN = (self._heads(part) for part in self.kv(ctx.memory_BED).chunk(2, -1))
        return k_BHEN, v_BHEN

    def _heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class CrossBlock(PreNormBlock):
    """x + attention(norm(x)), then x + cross(norm(x), memory), then x + mlp(norm(x))."""

    def __init__(
        self,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        attention: Attention,
        cross: CrossAttention,
        mlp: nn.Module,
        dropout: float,
        name: str,
    ) -> None:
        super().__init__((norms[0], norms[2]), attention, mlp, dropout, name)
        self.cross_norm, self.cross = norms[1], cross
        self.cross_dropout = Dropout(dropout, f"{name}.cross")

    def set_recompute(self, modules: Collection[str]) -> None:
        """As in other blocks; the cross-attention like the attention."""
        super().set_recompute(modules)
        self.cross.core.recompute = "core_attn" in modules

    def forward(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD."""
        ids = ctx.batch.sample_ids
        x = x_BSD + self.attention_dropout(self._attend(x_BSD, ctx), ids)
        x = x + self.cross_dropout(self._look(x, ctx), ids)
        return x + self.mlp_dropout(self._mlp(x), ids)

    def _look(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """Cross-attention with its norm."""
        if self.recompute:
            return self.cross(x_BSD, ctx, self.cross_norm)
        return self.cross(self.cross_norm(x_BSD), ctx)
