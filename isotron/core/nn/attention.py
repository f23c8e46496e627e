"""Causal multi-head attention with grouped queries.

Legend: B batch, S sequence, D hidden, H query heads, K key/value heads, N head size, T key positions. H and K are the
local heads, read from the shapes of the weights: the output projection's input width gives H, the rest of q|k|v is K
twice.

The socket `core` turns q_BHSN k_BKSN v_BKSN into o_BHSN; the heads of v may have another size. `Causal` is the plain
one: a fused kernel where nothing hinders it, explicit probabilities where dropout must be keyed, tiles (`tiles.py`)
where documents or a window leave only some blocks of queries and keys. Source: Ainslie et al. 2023 (grouped queries).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from isotron.core.batch import Places
from isotron.core.errors import refuse
from isotron.core.nn.backends import Flexible, Wanted, described, fused
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.flash import Flash, TorchCalls, documents
from isotron.core.nn.kernels import Explicit, HostFlash, Kernel, default_scale, tiled
from isotron.core.nn.linear import GradSink, Linear, sink_of
from isotron.core.nn.rope import rotate
from isotron.core.nn.tiles import Tile, tiles
from isotron.core.rows import Cuts, Runs, whole


class Causal(nn.Module):
    """Each query attends to itself and what came before, inside its document when the batch isolates documents.

    Without `causal`: to all of its row or document. Sinks, a score per head, are one more key that has no value.
    `window` above 0: to the last `window` positions only, itself included. `scale`: of the scores, 0 for 1/sqrt(N).
    `softcap` above 0: scores are bounded by it, which only explicit probabilities can.
    `backend`: see `backends.py`.
    """

    def __init__(
        self, dropout: Dropout, window: int = 0, scale: float = 0.0, softcap: float = 0.0, causal: bool = True
    ) -> None:
        super().__init__()
        if window and not causal:
            raise ValueError(
                f"a window of {window} ends at the query, and attention that is not causal looks behind it"
            )
        self.causal = causal
        self.dropout, self.window, self.scale, self.softcap = dropout, window, scale, softcap
        self.recompute, self.backend = False, "auto"

    def forward(
        self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, ctx: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_BHSN."""
        return self.over(q_BHSN, k_BKSN, v_BKSN, ctx.batch.cuts, ctx.batch.places, sinks_H)

    def over(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cuts: Cuts | None,
        places: Places,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention over whole rows in order; `cuts` are the documents of each row."""
        s = q.shape[2]
        kernel, window = self._kernel(q, places), self.window if self.window < s else 0
        if isinstance(kernel, Flexible):
            from isotron.core.nn.flex import flexible  # needs a newer torch than everything else

            options = {"scale": kernel.scale, "softcap": kernel.softcap}
            return flexible(q, k, v, sinks_H, cuts, window=window, causal=self.causal, **options)
        plain = cuts is None and not window and sinks_H is None and not self.softcap and q.shape[-1] == v.shape[-1]
        if isinstance(kernel, Flash) and not (plain and isinstance(kernel.calls, TorchCalls)):
            return documents(q, k, v, sinks_H, cuts or ((0, s),) * len(q), window, self.causal, kernel)
        if not plain or (isinstance(kernel, HostFlash) and self.backend != "fused"):
            return tiled(q, k, v, self.plan(whole(s), whole(s), cuts, len(q), kernel), kernel, sinks_H)
        if not isinstance(kernel, Explicit):
            grouped, causal = q.shape[1] != k.shape[1], self.causal
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped, scale=kernel.scale)
        if self.recompute:
            return checkpoint(self._explicit, q, k, v, places, use_reentrant=False, preserve_rng_state=False)
        return self._explicit(q, k, v, places)

    def plan(self, queries: Runs, keys: Runs, cuts: Cuts | None, batch: int, kernel: Kernel) -> tuple[Tile, ...]:
        """The tiles in which these queries meet these keys."""
        longest = max(r.row + r.length for r in (*queries, *keys))
        window = self.window if self.window < longest else 0
        return tiles(queries, keys, cuts, batch, window, kernel.most, kernel.join, self.causal)

    def kernel(self, q: Tensor, places: Places) -> Kernel:
        """What computes a tile of these queries; refused where the back end asked for cannot do it."""
        found = self._kernel(q, places)
        if isinstance(found, Flexible):
            case = "FlexAttention takes whole rows, and here the keys of a row come in parts"
            raise refuse(f"--attention-backend {self.backend}", case, "--attention-backend auto, or --cp-comm-type a2a")
        return found

    def _kernel(self, q: Tensor, places: Places) -> Kernel | Flexible:
        want = self._wanted(q.dtype, q.device, q.shape[-1], self.dropout.active)
        dropout = self.dropout if want.drops else None
        return fused(want) or Explicit(want.scale, dropout, places, self.softcap)

    def _wanted(self, dtype: torch.dtype, device: torch.device, head_size: int, drops: bool) -> Wanted:
        scale = self.scale or default_scale(head_size)
        return Wanted(self.backend, dtype, device, head_size, scale, self.softcap, drops)

    def chosen(self, dtype: torch.dtype, device: torch.device, head_size: int) -> str:
        """What computes attention in training, for a log: the back end asked for and the kernel it comes to."""
        return f"{self.backend}: {described(self._wanted(dtype, device, head_size, self.dropout.p > 0))}"

    def _explicit(self, q_BHSN: Tensor, k_BKTN: Tensor, v_BKTN: Tensor, places: Places) -> Tensor:
        repeat = q_BHSN.shape[1] // k_BKTN.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (k_BKTN, v_BKTN))
        s = q_BHSN.shape[2]
        scores = (q_BHSN * (self.scale or default_scale(q_BHSN.shape[-1]))) @ k.transpose(-1, -2)
        if self.causal:
            later = torch.ones(s, s, dtype=torch.bool, device=k.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        p = torch.softmax(scores, -1, dtype=wide).to(v.dtype)
        return self.dropout.on_probabilities(p, places) @ v


class _Given(torch.autograd.Function):
    """A parameter as an operand; its gradient goes to its sink."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        sink: GradSink | None = sink_of(p)
        ctx.sink = sink
        return p.detach().clone()

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Tensor | None:
        if ctx.sink is None:
            return dp
        ctx.sink.add(dp)
        return None


def given(p: Tensor) -> Tensor:
    """A parameter as an operand of plain operations."""
    found: Tensor = _Given.apply(p)
    return found


class Attention(nn.Module):
    """q|k|v in one projection, norms of q and k per head where given, rotation when the context has angles, the core,
    and the output projection.

    `bias`: of all projections, or (q|k|v, output). `qk_norms`: one for queries and one for keys, modules over N, or
    over all heads at once (`over_heads`). `local`: turned by the angles of blocks with a window. `softmax_type`: see
    `softmax_config.py`.
    """

    readers = 1  # projections that take what the norm before them gives

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
        scale: float = 0.0,
        softcap: float = 0.0,
        over_heads: bool = False,
        local: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        on_qkv, on_out = bias if isinstance(bias, tuple) else (bias, bias)
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * head_size, on_qkv)
        self.out = Linear(heads * head_size, hidden, on_out)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norms is not None:
            self.q_norm, self.k_norm = qk_norms
        self.core = Causal(dropout, window, scale, softcap)
        self.head_size, self.over_heads, self.local = head_size, over_heads, local
        self.softmax_type = softmax_type
        self.sinks = nn.Parameter(torch.zeros(heads)) if softmax_type == "learnable" else None

    def forward(self, x_BSD: Tensor, ctx: Context, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        y = self.qkv(x_BSD, pre)
        n = self.head_size
        y = y.view(*y.shape[:-1], y.shape[-1] // n, n)  # -1 is ambiguous where there is no row
        h = self.out.weight.shape[1] // n
        k = (y.shape[2] - h) // 2
        q_k, v = y.split((h + k, k), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_k = torch.cat((self._normed(self.q_norm, q_k[:, :, :h]), self._normed(self.k_norm, q_k[:, :, h:])), 2)
        rope = ctx.local_rope if self.local else ctx.rope
        if rope is not None:
            q_k = rotate(q_k, rope)
        q_BHSN, k_BKSN, v_BKSN = (x.transpose(1, 2) for x in (*q_k.split((h, k), 2), v))
        sinks_H = self._sinks(q_BHSN)
        o_BHSN = self.core(q_BHSN, k_BKSN, v_BKSN, ctx, *(() if sinks_H is None else (sinks_H,)))
        return self.out(o_BHSN.transpose(1, 2).flatten(2))

    def _sinks(self, q_BHSN: Tensor) -> Tensor | None:
        """The score of each local head's key that has no value, where there is one."""
        if self.sinks is not None:
            return given(self.sinks)
        return q_BHSN.new_zeros(q_BHSN.shape[1]) if self.softmax_type == "off-by-one" else None

    def _normed(self, norm: nn.Module, x_BSHN: Tensor) -> Tensor:
        return norm(x_BSHN.flatten(2)).view(x_BSHN.shape) if self.over_heads else norm(x_BSHN)
