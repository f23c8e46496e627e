"""The paged cache of a stage and the attention core that keeps keys and values in it.

Legend: T tokens of the pass, H query heads, K key/value heads (H and K local), G = H / K, N head size, P tokens of a
page, E pages as spans see them, S queries of a short span, R short spans, M pages of the span that has most.

What a layer keeps per token are two tensors [heads, size], whatever it gives its core as keys and values in its first
pass: queries must have the size of keys, values may have their own. They lie as [heads, slots, size], slot = page x P +
place on the page. So a layer that keeps a latent vector (one head of it as key, part of it as value) and unfolds it
elsewhere needs nothing else. `PagedCore` takes the place of every `Causal` core.

Short spans read pages where they lie, without a copy: every page is one batch entry of a fused kernel that also gives
the logarithm of its softmax's sum, and a span's pages are combined by those. The queries that share a key/value head
stand side by side as queries of that head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from isotron.core import comm
from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.nn.kernels import EXPLICIT_QUERIES, capped
from isotron.inference.plan import ByPage, Pass, Span

FEW = 64  # pages x heads


class Cache:
    """Room for `pages` x `page` tokens in every attention layer of a stage; `now` is the pass that is under way."""

    def __init__(self, pages: int, page: int) -> None:
        self.pages, self.page = pages, page
        self.now: Pass | None = None
        self.kept: list[Tensor] = []

    def room(self, new_TK1N: Tensor) -> Tensor:
        """[K, slots, N] for tokens like these; zeros, since a hidden slot has weight 0 and 0 x NaN is NaN."""
        _, heads, _, size = new_TK1N.shape
        made = torch.zeros(heads, self.pages * self.page, size, dtype=new_TK1N.dtype, device=new_TK1N.device)
        self.kept.append(made)
        return made

    @property
    def bytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(t.numel() * t.element_size() for t in self.kept)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        """The values of one page to another, in every layer."""
        a, b, n = source * self.page, target * self.page, self.page
        for tensor in self.kept:
            tensor[:, b : b + n] = tensor[:, a : a + n]


class PagedCore(nn.Module):
    """Keeps the new tokens' keys and values in the cache, and attends to all that their sequences have there."""

    def __init__(self, cache: Cache, plain: Causal) -> None:
        super().__init__()
        self.cache, self.window, self.scale = cache, plain.window, plain.scale or None
        self.softcap = plain.softcap
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(
        self, q_TH1N: Tensor, k_TK1N: Tensor, v_TK1N: Tensor, ctx: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_TH1N."""
        now = self.cache.now
        if now is None:
            raise RuntimeError("no pass has begun on this cache")
        if self.kept is None:
            self.kept = self.cache.room(k_TK1N), self.cache.room(v_TK1N)
        k_KTN, v_KTN = k_TK1N[:, :, 0].transpose(0, 1), v_TK1N[:, :, 0].transpose(0, 1)
        for kept, new_KTN in zip(self.kept, (k_KTN, v_KTN), strict=True):
            whole = new_KTN if now.spread is None else comm.all_gather(new_KTN.contiguous(), now.spread, 1)
            kept.index_copy_(1, now.slots_T, whole)
        q_THN = q_TH1N[:, :, 0]
        if not now.long:
            return self._short(q_THN, self.kept, now, sinks_H)[:, :, None]
        out = [self._short(q_THN[: now.shorts], self.kept, now, sinks_H)] if now.short else []
        first = now.shorts
        for span in now.long:
            part = slice(first, first + span.count)
            out.append(self._long(q_THN[part], k_KTN[:, part], v_KTN[:, part], self.kept, span, sinks_H))
            first += span.count
        return torch.cat(out)[:, :, None]

    def _short(self, q_THN: Tensor, kept: tuple[Tensor, Tensor], now: Pass, sinks_H: Tensor | None) -> Tensor:
        """o_THN of the short spans."""
        slots = now.alone(self.window)
        if slots is not None:
            return self._alone(q_THN, kept[0][:, slots], kept[1][:, slots], sinks_H)
        view, kv = now.by_page(self.window), kept[0].shape[0]
        q_RSKGN = (q_THN[:, None] if now.single else q_THN[now.take_RS]).unflatten(2, (kv, -1))
        q_EKQN = q_RSKGN.index_select(0, view.row_E).transpose(1, 2).flatten(2, 3)
        groups = q_RSKGN.shape[3]
        k_EKPN, v_EKPN = (self._pages(t, view) for t in kept)
        o_EKQN, lse_EKQ = page_attention(q_EKQN, k_EKPN, v_EKPN, view, self.scale, self.softcap)
        o_RKQN = combine(o_EKQN, lse_EKQ, view, groups, sinks_H)
        o = o_RKQN.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)  # R S H N
        return o[:, 0] if now.single else o.flatten(0, 1)[now.back_T]

    def _alone(self, q_1HN: Tensor, k_KPN: Tensor, v_KPN: Tensor, sinks_H: Tensor | None) -> Tensor:
        """o_1HN of the only token of a pass, whose sequence lies in a row: there is nothing to mask or to combine."""
        wide = torch.promote_types(q_1HN.dtype, torch.float32)
        q_KGN = q_1HN[0].unflatten(0, (k_KPN.shape[0], -1))
        scores = (q_KGN @ k_KPN.transpose(1, 2)).to(wide) * (self.scale or q_KGN.shape[-1] ** -0.5)
        sinks_KG1 = None if sinks_H is None else sinks_H.view(*q_KGN.shape[:2], 1)
        p = softmax_beside(capped(scores, self.softcap), sinks_KG1)
        return (p.to(v_KPN.dtype) @ v_KPN).flatten(0, 1)[None]

    def _pages(self, kept_KTN: Tensor, view: ByPage) -> Tensor:
        """[E, K, P, N]: in place where the pages lie together, else a copy."""
        p = self.cache.page
        if view.slots is None:
            first = view.first * p
            kept_KTN = kept_KTN[:, first : first + len(view.row_E) * p]
        else:
            kept_KTN = kept_KTN.index_select(1, view.slots)
        return kept_KTN.unflatten(1, (-1, p)).transpose(0, 1)

    def _long(
        self, q_SHN: Tensor, k_KSN: Tensor, v_KSN: Tensor, kept: tuple[Tensor, Tensor], span: Span,
        sinks_H: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """o_SHN of a span that attends to its own tokens, and to what came before it where anything did."""
        if span.start:
            slots = _slots(span, self.cache.page, q_SHN.device)
            k_KSN, v_KSN = (t.index_select(1, slots) for t in kept)
        mask = None
        if span.start or 0 < self.window < span.count:
            mask = torch.ones(span.count, span.end, dtype=torch.bool, device=q_SHN.device).tril(span.start)
            mask = mask.triu(span.start + 1 - self.window) if self.window else mask
        q, k, v = q_SHN.transpose(0, 1)[None], k_KSN[None], v_KSN[None]
        if self.softcap or sinks_H is not None:
            return explicit_attention(q, k, v, mask, self.scale, self.softcap, sinks_H)[0].transpose(0, 1)
        grouped = q.shape[1] != k.shape[1]
        o = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return o[0].transpose(0, 1)


def _slots(span: Span, page: int, device: torch.device) -> Tensor:
    """Where the tokens 0 .. end - 1 of a span's sequence lie."""
    table = torch.tensor(span.table[: -(-span.end // page)], dtype=torch.long, device=device)
    return (table[:, None] * page + torch.arange(page, device=device)).flatten()[: span.end]


def page_attention(
    q_EKQN: Tensor, k_EKPN: Tensor, v_EKPN: Tensor, view: ByPage, scale: float | None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of each entry's queries to its page alone: o_EKQN, and log sum exp of the scores, lse_EKQ."""
    mask = view.mask_E1SP
    queries = q_EKQN.shape[2]
    if queries != mask.shape[2]:
        mask = mask[:, :, :, None].expand(-1, -1, -1, queries // mask.shape[2], -1).flatten(2, 3)
    many = q_EKQN.shape[0] * q_EKQN.shape[1] > FEW  # for fewer products the fused kernel's preparations cost more
    if many and not softcap and q_EKQN.device.type == "cpu" and k_EKPN.shape[-1] == v_EKPN.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_EKQN, k_EKPN, v_EKPN, 0.0, False, attn_mask=mask, scale=scale
        )
    wide = torch.promote_types(q_EKQN.dtype, torch.float32)
    scores = (q_EKQN @ k_EKPN.transpose(-1, -2)).to(wide) * (scale or q_EKQN.shape[-1] ** -0.5)
    scores = capped(scores, softcap) + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num().to(v_EKPN.dtype) @ v_EKPN, lse


def softmax_beside(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Probabilities over the last dimension, beside one more key of score `sinks` that has no value."""
    if sinks is None:
        return torch.softmax(scores, -1)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks.to(scores.dtype))
    return (scores - total).exp()


def explicit_attention(
    q_BHSN: Tensor, k_BKTN: Tensor, v_BKTN: Tensor, mask_ST: Tensor | None, scale: float | None, softcap: float,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o_BHSN where scores have a bound or a sink, which fused kernels cannot give them; queries come in slices."""
    s, t, parts = q_BHSN.shape[2], k_BKTN.shape[2], []
    wide = torch.promote_types(q_BHSN.dtype, torch.float32)
    if mask_ST is None:
        mask_ST = torch.ones(s, t, dtype=torch.bool, device=q_BHSN.device).tril()
    q_BKGSN = q_BHSN.unflatten(1, (k_BKTN.shape[1], -1)) * (scale or q_BHSN.shape[-1] ** -0.5)
    sinks_KG11 = None if sinks_H is None else sinks_H.view(*q_BKGSN.shape[1:3], 1, 1)
    for start in range(0, s, EXPLICIT_QUERIES):
        part = slice(start, start + EXPLICIT_QUERIES)
        scores = capped((q_BKGSN[:, :, :, part] @ k_BKTN[:, :, None].transpose(-1, -2)).to(wide), softcap)
        p = softmax_beside(scores.masked_fill(~mask_ST[part], -torch.inf), sinks_KG11)
        parts.append((p.to(v_BKTN.dtype) @ v_BKTN[:, :, None]).flatten(1, 2))
    return torch.cat(parts, 2)


def combine(o_EKQN: Tensor, lse_EKQ: Tensor, view: ByPage, groups: int, sinks_H: Tensor | None = None) -> Tensor:
    """o_RKQN: the pages of each span, weighted by what their scores sum to, and by that beside the sinks."""
    if view.table_RM.shape[1] == 1:
        o, total = (t.index_select(0, view.table_RM[:, 0]) for t in (o_EKQN, lse_EKQ))
    else:
        bias_RM1Q = view.bias_RMS.repeat_interleave(groups, 2) if groups > 1 else view.bias_RMS
        lse_RMKQ = lse_EKQ[view.table_RM] + bias_RM1Q[:, :, None]
        weight_RMKQ = torch.softmax(lse_RMKQ, 1).to(o_EKQN.dtype)
        o_RMKQN = o_EKQN.index_select(0, view.table_RM.flatten()).unflatten(0, view.table_RM.shape)
        o, total = o_RMKQN.mul_(weight_RMKQ[..., None]).sum(1), lse_RMKQ
        total = total if sinks_H is None else total.logsumexp(1)
    if sinks_H is None:
        return o
    sinks_KQ = sinks_H.view(-1, 1, groups).expand(-1, o.shape[2] // groups, -1).flatten(1).to(total.dtype)
    return o * (total - torch.logaddexp(total, sinks_KQ)).exp().to(o.dtype)[..., None]


# ---- putting cores into a model ------------------------------------------------------------------------------------


def plain_core(layer: Any) -> Any:
    """The core of a layer on one process, also where context parallelism stands around it; None for other modules."""
    core = getattr(layer, "core", None)
    core = getattr(core, "plain", core)
    return core if isinstance(core, Causal) else None


@contextmanager
def cached(module: nn.Module, cache: Cache) -> Iterator[None]:
    """Inside, `module` is in evaluation mode and its attention layers keep their tokens in `cache`.

    Afterwards the module is what it was before, so that training can go on.
    """
    layers: list[Any] = [layer for layer in module.modules() if plain_core(layer) is not None]
    before = [(layer, layer.core) for layer in layers]
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        for layer in layers:
            layer.core = PagedCore(cache, plain_core(layer))
        yield
    finally:
        for layer, core in before:
            layer.core = core
        for part, training in modes:
            part.training = training
