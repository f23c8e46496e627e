"""Causal multi-head attention with grouped queries.

Legend: B batch, S sequence, D hidden, H query heads, K key/value heads, N head size, T key positions. H and K are the
local heads, read from the shapes of the weights: the output projection's input width gives H, the rest of q|k|v is K
twice.

The socket `core` turns q_BHSN k_BKTN v_BKTN into o_BHSN. `Causal` is the plain one: a fused kernel where nothing
hinders it, explicit probabilities where dropout must be keyed. Source: Ainslie et al. 2023 (grouped queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.linear import Linear
from isotron.core.nn.rope import rotate


class Causal(nn.Module):
    """Each query attends to itself and what came before, inside its document when the batch isolates documents.

    `window` above 0: to the last `window` positions only, itself included.
    """

    def __init__(self, dropout: Dropout, window: int = 0) -> None:
        super().__init__()
        self.dropout, self.window = dropout, window
        self.recompute = False

    def allowed(self, ctx: Context, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query may attend, [S, T] or [B, 1, S, T]; None when causality alone decides."""
        narrow = 0 < self.window < keys
        if ctx.mask_BSS is None and not narrow:
            return None
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        if narrow:
            mask = mask.triu(1 - self.window)
        return mask if ctx.mask_BSS is None else (ctx.mask_BSS & mask)[:, None]

    def forward(self, q_BHSN: Tensor, k_BKTN: Tensor, v_BKTN: Tensor, ctx: Context) -> Tensor:
        """o_BHSN."""
        if not self.dropout.active:
            mask = self.allowed(ctx, q_BHSN.shape[2], k_BKTN.shape[2], q_BHSN.device)
            grouped = q_BHSN.shape[1] != k_BKTN.shape[1]
            return scaled_dot_product_attention(
                q_BHSN, k_BKTN, v_BKTN, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        if self.recompute:
            return checkpoint(
                self._explicit, q_BHSN, k_BKTN, v_BKTN, ctx, use_reentrant=False, preserve_rng_state=False
            )
        return self._explicit(q_BHSN, k_BKTN, v_BKTN, ctx)

    def _explicit(self, q_BHSN: Tensor, k_BKTN: Tensor, v_BKTN: Tensor, ctx: Context) -> Tensor:
        repeat = q_BHSN.shape[1] // k_BKTN.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (k_BKTN, v_BKTN))
        s, t = q_BHSN.shape[2], k.shape[2]
        allowed = self.allowed(ctx, s, t, k.device)
        if allowed is None:
            allowed = torch.ones(s, t, dtype=torch.bool, device=k.device).tril()
        scores = (q_BHSN / math.sqrt(q_BHSN.shape[-1])) @ k.transpose(-1, -2)
        scores = scores.masked_fill(~allowed, -torch.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        p = torch.softmax(scores, -1, dtype=wide).to(v.dtype)
        return self.dropout.on_probabilities(p, ctx.batch.sample_ids) @ v


class Attention(nn.Module):
    """q|k|v in one projection, norms of q and k per head where given, rotation when the context has angles, the core,
    and the output projection.

    `bias`: of all projections, or (q|k|v, output). `qk_norms`: modules over N, one for queries and one for keys.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        dropout: Dropout,
        bias: bool | tuple[bool, bool],
        qk_norms: tuple[nn.Module, nn.Module] | None = None,
        window: int = 0,
    ) -> None:
        super().__init__()
        on_qkv, on_out = bias if isinstance(bias, tuple) else (bias, bias)
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * head_size, on_qkv)
        self.out = Linear(heads * head_size, hidden, on_out)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norms is not None:
            self.q_norm, self.k_norm = qk_norms
        self.core = Causal(dropout, window)
        self.head_size = head_size

    def forward(self, x_BSD: Tensor, ctx: Context, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        y = self.qkv(x_BSD, pre)
        n = self.head_size
        y = y.view(*y.shape[:-1], -1, n)
        h = self.out.weight.shape[1] // n
        k = (y.shape[2] - h) // 2
        q_k, v = y.split((h + k, k), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_k = torch.cat((self.q_norm(q_k[:, :, :h]), self.k_norm(q_k[:, :, h:])), 2)
        if ctx.rope is not None:
            q_k = rotate(q_k, ctx.rope)
        q_BHSN, k_BKSN, v_BKSN = (x.transpose(1, 2) for x in (*q_k.split((h, k), 2), v))
        o_BHSN = self.core(q_BHSN, k_BKSN, v_BKSN, ctx)
        return self.out(o_BHSN.transpose(1, 2).flatten(2))
