"""FlexAttention over whole rows: documents, a window and bounded scores in one kernel, with work by blocks.

Legend: B rows, H query heads, K key/value heads, S slots, N head size, C blocks of a row.

What the kernel is told is, for each block of queries, which blocks of keys it meets at all and which of these it meets
wholly; only in the others does it ask slot by slot. These lists are made from the borders of documents, so nothing of
the size S x S is. Source: Dong et al. 2024 (FlexAttention), torch.nn.attention.flex_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from isotron.core import device as devices
from isotron.core.rows import Cuts

BLOCK = 128  # slots


def numbers(cuts: Cuts | None, rows: int, length: int) -> Tensor:
    """[B, S] the document of every slot, in ascending order."""
    if cuts is None:
        return torch.zeros(rows, length, dtype=torch.int32)
    sizes = [torch.tensor([b - a for a, b in zip(borders, borders[1:], strict=False)]) for borders in cuts]
    return torch.stack([torch.arange(len(n), dtype=torch.int32).repeat_interleave(n) for n in sizes])


def allowed(docs_BS: Tensor, window: int, causal: bool) -> Callable[..., Tensor]:
    """Whether a query of a row meets a key of it."""

    def meets(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = docs_BS[b, q] == docs_BS[b, k]
        if not causal:
            return same
        same = same & (k <= q)
        return same & (q - k < window) if window else same

    return meets


def meetings(docs_BS: Tensor, window: int, causal: bool, block: int) -> tuple[Tensor, Tensor]:
    """[B, C, C] whether a block of queries meets a block of keys in part, and wholly."""
    length = docs_BS.shape[1]
    first = torch.arange(0, length, block)
    last = (first + block - 1).clamp_max(length - 1)
    low, high = docs_BS[:, first], docs_BS[:, last]
    some = (low[:, :, None] <= high[:, None]) & (high[:, :, None] >= low[:, None])
    every = (low == high)[:, :, None] & (low == high)[:, None] & (low[:, :, None] == low[:, None])
    if causal:
        some = some & (first <= last[:, None])
        every = every & (last <= first[:, None])
        if window:
            some = some & (first[:, None] - last < window)
            every = every & (last[:, None] - first < window)
    whole = (last - first + 1) == block  # a shorter block at the end is not filled by what it meets
    every = every & whole[:, None] & whole
    return some & ~every, every


def _listed(meets_BCC: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries meets, and their numbers first: [B, 1, C], [B, 1, C, C]."""
    order = torch.argsort((~meets_BCC).int(), dim=-1, stable=True)
    return meets_BCC.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()


@lru_cache(maxsize=8)
def block_mask(
    cuts: Cuts | None, rows: int, length: int, window: int, causal: bool, device: torch.device, block: int = BLOCK
) -> BlockMask:
    """The mask of rows as the kernel takes it."""
    docs = numbers(cuts, rows, length)
    part, every = (_listed(m) for m in meetings(docs, window, causal, block))
    some, at, all_of, there = (t.to(device) for t in (*part, *every))
    meets = allowed(docs.to(device), window, causal)
    return BlockMask.from_kv_blocks(some, at, all_of, there, block, meets, (length, length))


def _bound(softcap: float) -> Callable[..., Tensor] | None:
    if not softcap:
        return None

    def bounded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return bounded


@lru_cache(maxsize=2)
def _compiled(compile_it: bool) -> Any:
    """The kernel; without a compiler torch's own eager form of it, which forms all scores and is for tests."""
    return torch.compile(flex_attention, dynamic=False) if compile_it else flex_attention


def flexible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    cuts: Cuts | None,
    *,
    window: int,
    causal: bool,
    scale: float,
    softcap: float,
) -> Tensor:
    """o_BHSN of whole rows."""
    mask = block_mask(cuts, len(q), q.shape[2], window, causal, q.device)
    o, aux = _compiled(devices.is_cuda(q.device))(
        q, k, v, _bound(softcap), mask, scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True)
    )
    if sinks_H is None:
        return o
    both = torch.logaddexp(aux.lse, sinks_H.to(aux.lse.dtype)[None, :, None])
    return (o * (aux.lse - both).exp()[..., None]).to(q.dtype)
