"""Attention kernels over tiles: what a tile gives, and how tiles are put together by the log-sum-exp of their scores.

Legend: B batch, H query heads, K key/value heads, S queries, T keys, N head size of queries and keys, V of values.

A kernel turns one tile into (o, lse) and, given the o and lse of the whole row of keys, into the tile's part of the
gradients: with p = exp(score - lse) parts from different tiles add up. Source: Dao 2023 (FlashAttention-2), section 3;
Liu et al. 2023 (ring attention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from isotron.core.batch import Places
from isotron.core.device import has_grouped_host_flash
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.tiles import Kind, Tile

aten = torch.ops.aten
HOST_SQUARE = 256  # queries of a causal square whose gradients one call of the host's kernel computes
EXPLICIT_QUERIES = 1024  # queries of an explicit tile: its scores exist in memory


class Kernel(Protocol):
    """One way to compute a tile."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        ...

    @property
    def most(self) -> int:
        """Queries per tile that it asks for; 0 for any."""
        ...

    @property
    def join(self) -> bool:
        """Whether a tile may span several runs (see `tiles`)."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """o_BHSV and lse_BHS of the tile's own keys."""
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's part of dq, dk, dv; o and lse are those over all keys."""
        ...


@lru_cache(maxsize=64)
def band(queries: int, keys: int, ahead: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, T] zeros where a query may attend and -inf elsewhere; the first query stands `ahead` slots after the first
    key.
    """
    distance = ahead + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _bias(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if tile.kind is Kind.FULL:
        return None
    queries, keys = tile.shape
    return band(queries, keys, 0 if tile.kind is Kind.CAUSAL else tile.q_at - tile.k_at, tile.window, dtype, device)


@dataclass(frozen=True)
class HostFlash:
    """torch's flash kernel for the CPU; any floating type, grouped queries, masks."""

    scale: float
    most: int = 0
    join: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """o and lse of a tile."""
        causal = tile.kind is Kind.CAUSAL
        mask = _bias(tile, q.dtype, q.device) if tile.kind is Kind.BAND else None
        k, wide = (_per_query_head(x, q) for x in (k, _padded(v, q.shape[-1])))
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, wide, 0.0, causal, attn_mask=mask, scale=self.scale
        )
        return o[..., : v.shape[-1]], lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's part of dq, dk, dv, by way of float32 where the type is narrower: as fast, and not rounded."""
        mask = _bias(tile, q.dtype, q.device) if tile.kind is Kind.BAND else None
        wide, n = torch.promote_types(q.dtype, torch.float32), q.shape[-1]
        do, q_wide, k, v_wide, o = (_padded(x.to(wide), n) for x in (do, q, k, v, o))
        mask = None if mask is None else mask.to(wide)
        heads, (k, v_wide) = k.shape[1], (_per_query_head(x, q) for x in (k, v_wide))
        found = self._gradients((do, q_wide, k, v_wide, o, lse), tile.kind is Kind.CAUSAL, mask)
        if k.shape[1] != heads:
            found = (found[0], *(x.unflatten(1, (heads, -1)).sum(2) for x in found[1:]))
        dq, dk, dv = (x.to(q.dtype) for x in found)
        return dq, dk, dv[..., : v.shape[-1]]

    def _gradients(self, tensors: tuple[Tensor, ...], causal: bool, mask: Tensor | None) -> tuple[Tensor, ...]:
        """dq, dk, dv of do, q, k, v, o, lse. torch's kernel computes all of a causal square, so a large one is halved:
        the two squares on the diagonal and the rectangle below.
        """
        do, q, k, v, o, lse = tensors
        if not causal or q.shape[2] <= HOST_SQUARE:
            found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=self.scale
            )
            return found
        half = q.shape[2] // 2
        early = self._gradients(tuple(x[:, :, :half] for x in tensors), True, None)
        do, q, o, lse = (x[:, :, half:] for x in (do, q, o, lse))
        below = self._gradients((do, q, k[:, :, :half], v[:, :, :half], o, lse), False, None)
        late = self._gradients((do, q, k[:, :, half:], v[:, :, half:], o, lse), True, None)
        late[0].add_(below[0])
        early[1].add_(below[1])
        early[2].add_(below[2])
        return tuple(torch.cat(pair, 2) for pair in zip(early, late, strict=True))


def _per_query_head(x_BKSN: Tensor, q_BHSN: Tensor) -> Tensor:
    """Keys or values of each query's head, where the kernel does not find those of its group."""
    groups = q_BHSN.shape[1] // x_BKSN.shape[1]
    return x_BKSN if groups == 1 or has_grouped_host_flash() else x_BKSN.repeat_interleave(groups, 1)


@dataclass(frozen=True)
class Explicit:
    """Scores and probabilities as tensors of one tile: any device, any shape, with dropout of the probabilities.

    `softcap` above 0: scores are softcap x tanh(score / softcap). Source: Gemma team 2024 (Gemma 2), section 2.
    """

    scale: float
    dropout: Dropout | None = None
    places: Places | None = None
    softcap: float = 0.0
    most: int = EXPLICIT_QUERIES
    join: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """o and lse of a tile."""
        scores = _masked(self._scores(q, k), tile)
        lse = torch.logsumexp(scores, -1)
        p = torch.exp(scores - lse[..., None])
        return _grouped_matmul(self._drop(p, tile).to(v.dtype), v), lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's part of dq, dk, dv."""
        scores = self._scores(q, k)
        p = torch.exp(_masked(scores, tile) - lse[..., None])
        dv = _to_groups(self._drop(p, tile).to(v.dtype), do, v.shape[1])
        dp = self._drop(_grouped_matmul(do, v.transpose(-1, -2)).to(p.dtype), tile)
        delta = (do.to(p.dtype) * o).sum(-1, keepdim=True)
        ds = p * (dp - delta) * self.scale
        if self.softcap:
            ds = ds * (1 - (scores / self.softcap).square())
        ds = ds.to(q.dtype)
        return _grouped_matmul(ds, k), _to_groups(ds, q, k.shape[1]), dv

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return capped((_grouped_matmul(q, k.transpose(-1, -2))).to(wide) * self.scale, self.softcap)

    def _drop(self, x: Tensor, tile: Tile) -> Tensor:
        if self.dropout is None or self.places is None:
            return x
        return self.dropout.on_probabilities(x, self.places, tile.q_at, tile.k_at, slice(*tile.rows))


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores kept between -softcap and softcap; 0 leaves them as they are."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def _masked(scores: Tensor, tile: Tile) -> Tensor:
    bias = _bias(tile, scores.dtype, scores.device)
    return scores if bias is None else scores + bias


def _padded(x: Tensor, size: int) -> Tensor:
    """Zeros behind the last dimension up to `size`."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def _grouped_matmul(a_BHSX: Tensor, b_BKXY: Tensor) -> Tensor:
    """a @ b with each head of b for its group of heads of a."""
    groups = a_BHSX.unflatten(1, (b_BKXY.shape[1], -1))
    return (groups @ b_BKXY[:, :, None]).flatten(1, 2)


def _to_groups(p_BHST: Tensor, x_BHSY: Tensor, kv_heads: int) -> Tensor:
    """p^T x summed over each group of heads: [B, K, T, Y]."""
    p, x = (t.unflatten(1, (kv_heads, -1)) for t in (p_BHST, x_BHSY))
    return (p.transpose(-1, -2) @ x).sum(2)


# ---- putting tiles together ----------------------------------------------------------------------------------------


def empty_result(q: Tensor, v: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """(o_BHSV, lse_BHS) without any key; `exact`: o in float32 or wider, for several tiles over the same queries."""
    b, h, s, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(b, s, h, v.shape[-1], dtype=wide if exact else q.dtype, device=q.device).transpose(1, 2)
    return o, torch.full((b, h, s), -torch.inf, dtype=wide, device=q.device)


def add_tiles(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, plan: Sequence[Tile], o: Tensor, lse: Tensor, begun: bool = False
) -> None:
    """Bring the keys of a plan into (o, lse). `begun`: they hold other keys already."""
    for tile in plan:
        rows, on, over = slice(*tile.rows), slice(*tile.q), slice(*tile.k)
        part, part_lse = kernel.forward(q[rows, :, on], k[rows, :, over], v[rows, :, over], tile)
        o_here, lse_here = o[rows, :, on], lse[rows, :, on]
        if tile.first and not begun:
            o_here.copy_(part)
            lse_here.copy_(part_lse)
            continue
        both = torch.logaddexp(lse_here, part_lse)
        o_here.mul_((lse_here - both).exp_()[..., None]).addcmul_(part.to(o.dtype), (part_lse - both).exp_()[..., None])
        lse_here.copy_(both)


def add_gradients(
    kernel: Kernel,
    do: Tensor,
    q_k_v: tuple[Tensor, Tensor, Tensor],
    o_lse: tuple[Tensor, Tensor],
    plan: Sequence[Tile],
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of a plan's tiles to dq, dk, dv."""
    (q, k, v), (o, lse), (dq, dk, dv) = q_k_v, o_lse, sums
    for tile in plan:
        rows, on, over = slice(*tile.rows), slice(*tile.q), slice(*tile.k)
        here = (do[rows, :, on], q[rows, :, on], k[rows, :, over], v[rows, :, over], o[rows, :, on], lse[rows, :, on])
        a, b, c = kernel.backward(*here, tile)
        dq[rows, :, on].add_(a)
        dk[rows, :, over].add_(b)
        dv[rows, :, over].add_(c)


def zeros_like_wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros of the same shapes in float32 or wider."""
    return tuple(
        torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device) for t in tensors
    )


def add_sinks(o: Tensor, lse: Tensor, sinks_H: Tensor | None) -> Tensor:
    """The lse_BHS with one more key for every query, of a score per head and without a value; scales o in place.

    Tiles are put together first: their gradients need no more than the o and lse that come of this. Source: Xiao et al.
    2023 (attention sinks); OpenAI 2025 (gpt-oss).
    """
    if sinks_H is None:
        return lse
    both = torch.logaddexp(lse, sinks_H.to(lse.dtype)[None, :, None])
    o.mul_((lse - both).exp()[..., None])
    return both


def sinks_gradient(do: Tensor, o: Tensor, lse: Tensor, sinks_H: Tensor | None) -> Tensor | None:
    """Of the scores of sinks: they take probability from what the output is made of."""
    if sinks_H is None:
        return None
    taken = (sinks_H.to(lse.dtype)[None, :, None] - lse).exp()
    return -(taken * (do.to(lse.dtype) * o).sum(-1)).sum((0, 2)).to(sinks_H.dtype)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Sequence[Tile], kernel: Kernel
    ) -> Tensor:
        if sinks is None and _is_all(plan, q, k):
            o, lse = kernel.forward(q, k, v, plan[0])
            o = o.transpose(1, 2).contiguous().transpose(1, 2)  # what the output projection keeps is this, not a copy
        else:
            o, lse = empty_result(q, v, sinks is not None or not all(tile.first for tile in plan))
            add_tiles(kernel, q, k, v, plan, o, lse)
            lse = add_sinks(o, lse, sinks)
            o = o.to(q.dtype)
        ctx.plan, ctx.kernel = plan, kernel
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        if _is_all(ctx.plan, q, k):
            found = ctx.kernel.backward(do, q, k, v, o, lse, ctx.plan[0])
        else:
            sums = zeros_like_wide(q, k, v)
            add_gradients(ctx.kernel, do, (q, k, v), (o, lse), ctx.plan, sums)  # type: ignore[arg-type]
            found = tuple(s.to(q.dtype) for s in sums)
        return *found, sinks_gradient(do, o, lse, sinks), None, None


def _is_all(plan: Sequence[Tile], q: Tensor, k: Tensor) -> bool:
    """Whether a plan is one tile, of all rows, queries and keys."""
    whole = (0, len(q)), (0, q.shape[2]), (0, k.shape[2])
    return len(plan) == 1 and (plan[0].rows, plan[0].q, plan[0].k) == whole


def tiled(
    q: Tensor, k: Tensor, v: Tensor, plan: Sequence[Tile], kernel: Kernel, sinks_H: Tensor | None = None
) -> Tensor:
    """o_BHSV of attention inside the tiles of a plan, all on this rank."""
    return _Tiled.apply(q, k, v, sinks_H, plan, kernel)


def default_scale(head_size: int) -> float:
    """1 / sqrt(N)."""
    return 1 / math.sqrt(head_size)
