"""Multi-head latent attention: keys and values of all heads unfold from one short vector per token.

Legend: B batch, S sequence, D hidden, H query heads (local), N unrotated and P rotated elements of a query or key head,
V of a value head, Q and R widths of the latent vectors of queries and of keys and values.

q = up(norm(down(x))), or one projection where Q is 0; c_R | k_P = down(x); k_N | v = up(norm(c)) per head; rotated, k_P
serves all heads. The short projections are whole on every rank, the unfolding ones are split by heads.

Beside a core that keeps tokens (generation) the unfolding moves to the other side: queries go to the latent space, keys
are norm(c) | k_P and values norm(c), one head for all, so that only R + P numbers per token are kept. Both forms are
the same products in another order. Source: DeepSeek-AI 2024a (DeepSeek-V2), section 2.1 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.nn.dispatch import through
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.linear import Linear
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rope import rotate


@dataclass(frozen=True)
class LatentSizes:
    """Widths: latent vectors of queries (0: none) and of keys and values; unrotated and rotated part; value head."""

    query: int
    latent: int
    plain: int
    rotated: int
    value: int


class LatentAttention(nn.Module):
    """`scale`: of the scores. `epsilon`: of the norms of latent vectors."""

    readers = 2  # see `Attention`: of queries, and of keys and values

    def __init__(
        self, hidden: int, heads: int, sizes: LatentSizes, dropout: Dropout, scale: float, epsilon: float
    ) -> None:
        super().__init__()
        self.sizes = sizes
        wide = heads * (sizes.plain + sizes.rotated)
        if sizes.query:
            self.q_down = Linear(hidden, sizes.query)
            self.q_norm = RMSNorm(sizes.query, epsilon)
        self.q_up = Linear(sizes.query or hidden, wide)
        self.kv_down = Linear(hidden, sizes.latent + sizes.rotated)
        self.kv_norm = RMSNorm(sizes.latent, epsilon)
        self.kv_up = Linear(sizes.latent, heads * (sizes.plain + sizes.value))
        self.out = Linear(heads * sizes.value, hidden)
        self.core = Causal(dropout, scale=scale)

    def forward(self, x_BSD: Tensor, ctx: Context, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first. Selective recompute forms it again for each projection that reads it."""
        z, rope = self.sizes, ctx.rope
        if rope is None:
            raise RuntimeError("latent attention has rotated positions, and the context has no angles")
        q = self.q_up(self.q_norm(self.q_down(x_BSD, pre))) if z.query else self.q_up(x_BSD, pre)
        q_plain, q_turned = q.unflatten(-1, (-1, z.plain + z.rotated)).split((z.plain, z.rotated), -1)
        c, k_shared = self.kv_down(x_BSD, pre).split((z.latent, z.rotated), -1)
        c = self.kv_norm(c)
        k_turned = rotate(through(k_shared.contiguous(), self.kv_up.enter)[:, :, None], rope)
        q_turned = rotate(q_turned, rope)
        if getattr(self.core, "cache", None) is not None:
            return self.out(self._folded(q_plain, q_turned, c, k_turned, ctx))
        k_plain, v = self.kv_up(c).unflatten(-1, (-1, z.plain + z.value)).split((z.plain, z.value), -1)
        k_turned = k_turned.expand(*k_plain.shape[:3], z.rotated)
        q, k = torch.cat((q_plain, q_turned), -1), torch.cat((k_plain, k_turned), -1)
        o_BHSV = self.core(*(t.transpose(1, 2) for t in (q, k, v)), ctx)
        return self.out(o_BHSV.transpose(1, 2).flatten(2))

    def _folded(self, q_plain: Tensor, q_turned: Tensor, c_BSR: Tensor, k_turned: Tensor, ctx: Context) -> Tensor:
        """The heads' outputs [B, S, H*V] with keys and values as they are kept."""
        z = self.sizes
        up_HOR = self.kv_up.weight.view(-1, z.plain + z.value, z.latent)
        into, back = up_HOR[:, : z.plain], up_HOR[:, z.plain :]
        q = torch.cat((torch.einsum("bshn,hnr->bshr", q_plain, into), q_turned), -1)
        c = c_BSR[:, :, None]
        k = torch.cat((c, k_turned), -1)
        o_BHSR = self.core(*(t.transpose(1, 2) for t in (q, k, c)), ctx)
        return torch.einsum("bhsr,hvr->bshv", o_BHSR, back).flatten(2)
