"""Flash kernels of accelerators, torch's own and the flash-attn package's, over sequences laid one after the other.

Legend: B rows, H query heads, K key/value heads, S queries, T keys, N head size; Q and U all queries and all keys.

Both take sequences of any length by their cumulative lengths, grouped queries, and a span (left, right): a query sees
keys from `left` before it to `right` behind it, -1 for no end, where the last query stands at the last key. So one call
computes a tile, or all documents of a microbatch. Sources: Dao 2023 (FlashAttention-2), torch.nn.attention.varlen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from isotron.core.nn.kernels import add_sinks, sinks_gradient
from isotron.core.nn.tiles import Kind, Span, Tile
from isotron.core.rows import Cuts

aten = torch.ops.aten
EVERY, CAUSAL = (-1, -1), (-1, 0)
LARGEST_HEAD = 256
Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Lengths:
    """Where each sequence begins among the queries and among the keys (int32, one more than sequences), and the most
    queries and keys of a sequence.
    """

    queries: Tensor
    keys: Tensor
    most: Span


class Calls(Protocol):
    """The two calls of a library."""

    @property
    def name(self) -> str:
        """For a log."""
        ...

    def forward(
        self, q_QHN: Tensor, k_UKN: Tensor, v_UKN: Tensor, at: Lengths, span: Span, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """o_QHN and lse_HQ."""
        ...

    def backward(
        self, do: Tensor, q_k_v: Three, o_lse: tuple[Tensor, Tensor], at: Lengths, span: Span, scale: float,
        softcap: float,
    ) -> Three:  # fmt: skip
        """dq, dk, dv."""
        ...


class TorchCalls:
    """torch's flash kernel. It has no bound on scores."""

    name = "torch's flash kernel"

    def forward(
        self, q_QHN: Tensor, k_UKN: Tensor, v_UKN: Tensor, at: Lengths, span: Span, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """o_QHN and lse_HQ."""
        o, lse, *_ = aten._flash_attention_forward(
            q_QHN, k_UKN, v_UKN, at.queries, at.keys, *at.most, 0.0, span == CAUSAL, False, scale=scale,
            window_size_left=span[0], window_size_right=span[1],
        )  # fmt: skip
        return o, lse

    def backward(
        self, do: Tensor, q_k_v: Three, o_lse: tuple[Tensor, Tensor], at: Lengths, span: Span, scale: float,
        softcap: float,
    ) -> Three:  # fmt: skip
        """dq, dk, dv."""
        # without dropout the state of its generator is not read
        state = torch.zeros(2, dtype=torch.uint64, device=do.device)
        found: Three = aten._flash_attention_backward(
            do, *q_k_v, *o_lse, at.queries, at.keys, *at.most, 0.0, span == CAUSAL, state, state[:0], scale=scale,
            window_size_left=span[0], window_size_right=span[1],
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class PackageCalls:
    """The flash-attn package, from version 2.7. `api`: its module of calls."""

    api: ModuleType
    name: str = "the flash-attn package"

    def forward(
        self, q_QHN: Tensor, k_UKN: Tensor, v_UKN: Tensor, at: Lengths, span: Span, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """o_QHN and lse_HQ."""
        o, lse, *_ = self.api._flash_attn_varlen_forward(
            q_QHN, k_UKN, v_UKN, at.queries, at.keys, *at.most, dropout_p=0.0, softmax_scale=scale,
            causal=span == CAUSAL, window_size_left=span[0], window_size_right=span[1], softcap=softcap,
        )  # fmt: skip
        return o, lse

    def backward(
        self, do: Tensor, q_k_v: Three, o_lse: tuple[Tensor, Tensor], at: Lengths, span: Span, scale: float,
        softcap: float,
    ) -> Three:  # fmt: skip
        """dq, dk, dv; deterministic, so that a run repeats itself."""
        dq, dk, dv = (torch.empty_like(x) for x in q_k_v)
        self.api._flash_attn_varlen_backward(
            do, *q_k_v, *o_lse, dq, dk, dv, at.queries, at.keys, *at.most, dropout_p=0.0, softmax_scale=scale,
            causal=span == CAUSAL, window_size_left=span[0], window_size_right=span[1], softcap=softcap,
            alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv


@dataclass(frozen=True)
class Flash:
    """The kernel of tiles that such calls make. Heads are padded to a multiple of 8."""

    scale: float
    calls: Calls
    softcap: float = 0.0
    most: int = 0
    join: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """o and lse of a tile."""
        o, lse = self.along(*_flat(q, k, v), even(q, k), span_of(tile))
        return _rows(o, q)[..., : v.shape[-1]], _lse_rows(lse, q)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's part of dq, dk, dv."""
        do, o = _flat_one(do.to(q.dtype), _width(q)), _flat_one(o.to(q.dtype), _width(q))
        lse_HQ = lse.transpose(0, 1).flatten(1).contiguous()
        found = self.calls.backward(
            do, _flat(q, k, v), (o, lse_HQ), even(q, k), span_of(tile), self.scale, self.softcap
        )
        dq, dk, dv = (_rows(x, like) for x, like in zip(found, (q, k, v), strict=True))
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

    def along(self, q_QHN: Tensor, k_UKN: Tensor, v_UKN: Tensor, at: Lengths, span: Span) -> tuple[Tensor, Tensor]:
        """o_QHN and lse_HQ of sequences."""
        return self.calls.forward(q_QHN, k_UKN, v_UKN, at, span, self.scale, self.softcap)


def span_of(tile: Tile) -> Span:
    """How far the queries of a tile see, counted from its last query and its last key."""
    if tile.kind is not Kind.BAND:
        return EVERY if tile.kind is Kind.FULL else CAUSAL
    queries, keys = tile.shape
    behind = tile.q_at + queries - tile.k_at - keys  # slots of the last query behind the last key
    return (tile.window - 1 - behind if tile.window else -1), behind


@lru_cache(maxsize=64)
def _even(rows: int, queries: int, keys: int, device: torch.device) -> Lengths:
    q, k = (torch.arange(rows + 1, dtype=torch.int32, device=device) * n for n in (queries, keys))
    return Lengths(q, k, (queries, keys))


def even(q_BHSN: Tensor, k_BKTN: Tensor) -> Lengths:
    """Rows of one length each."""
    return _even(len(q_BHSN), q_BHSN.shape[2], k_BKTN.shape[2], q_BHSN.device)


@lru_cache(maxsize=8)
def _of_documents(cuts: Cuts, device: torch.device) -> Lengths:
    starts = [0]
    for borders in cuts:
        first = starts[-1]
        starts += [first + stop for stop in borders[1:]]
    most = max(b - a for a, b in zip(starts, starts[1:], strict=False))
    at = torch.tensor(starts, dtype=torch.int32).to(device)
    return Lengths(at, at, (most, most))


def _width(q: Tensor) -> int:
    return -(-q.shape[-1] // 8) * 8


def _flat_one(x_BHSN: Tensor, width: int) -> Tensor:
    """[B x S, H, width], zeros behind the last dimension."""
    flat = x_BHSN.transpose(1, 2).flatten(0, 1)
    return (flat if flat.shape[-1] == width else pad(flat, (0, width - flat.shape[-1]))).contiguous()


def _flat(q: Tensor, k: Tensor, v: Tensor) -> Three:
    q, k, v = (_flat_one(x, _width(q)) for x in (q, k, v))
    return q, k, v


def _rows(x_QHN: Tensor, like_BHSN: Tensor) -> Tensor:
    return x_QHN.unflatten(0, (len(like_BHSN), like_BHSN.shape[2])).transpose(1, 2)


def _lse_rows(lse_HQ: Tensor, like_BHSN: Tensor) -> Tensor:
    return lse_HQ.unflatten(1, (len(like_BHSN), -1)).transpose(0, 1)


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, at: Lengths, span: Span, kernel: Flash
    ) -> Tensor:
        q_k_v = _flat(q, k, v)
        o, lse = kernel.along(*q_k_v, at, span)
        if sinks is not None:
            rows = o.to(lse.dtype).transpose(0, 1)[None]  # [1, H, Q, N], as of one long row
            lse = add_sinks(rows, lse[None], sinks)[0]
            o = rows[0].transpose(0, 1).to(q.dtype).contiguous()
        ctx.shapes, ctx.at, ctx.span, ctx.kernel = (q.shape, k.shape, v.shape), at, span, kernel
        ctx.save_for_backward(*q_k_v, sinks, o, lse)
        return _rows(o, q)[..., : v.shape[-1]]

    @staticmethod
    def backward(ctx: Any, do_BHSN: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        do, kernel = _flat_one(do_BHSN.to(q.dtype), q.shape[-1]), ctx.kernel
        found = kernel.calls.backward(do, (q, k, v), (o, lse), ctx.at, ctx.span, kernel.scale, kernel.softcap)
        grads = (
            x.unflatten(0, (shape[0], shape[2])).transpose(1, 2)[..., : shape[-1]]
            for x, shape in zip(found, ctx.shapes, strict=True)
        )
        dsinks = None
        if sinks is not None:
            dsinks = sinks_gradient(do.transpose(0, 1)[None], o.transpose(0, 1)[None], lse[None], sinks)
        return *grads, dsinks, None, None, None


def documents(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, cuts: Cuts, window: int, causal: bool, kernel: Flash
) -> Tensor:
    """o_BHSV of whole rows, all documents of all rows in one call."""
    span = ((window - 1 if window else -1), 0) if causal else EVERY
    return _Documents.apply(q, k, v, sinks_H, _of_documents(cuts, q.device), span, kernel)
