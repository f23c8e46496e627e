"""Attention over heads instead of slots: an all-to-all gives every rank whole rows of some heads, another one takes
them back. Hierarchical: that inside small groups, and a ring over what the groups hold.

Legend: B batch, H query heads, K key/value heads, S local slots, N head size, n ranks of the inner group.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses); Fang & Zhao 2024 (hierarchical).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.errors import refuse
from isotron.core.mesh import Group
from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.parallel.context_ring import Ring, part_of
from isotron.core.rows import joined, slots

Move = Callable[[Tensor, Group], Tensor]


class _Moved(torch.autograd.Function):
    """`there(x)`; the gradient comes `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(dx, ctx.group), None, None, None


def to_heads(x: Tensor, group: Group) -> Tensor:
    """x_B(nH)SN of the local slots -> x_BH(nS)N of the local heads, slots in rank order."""
    return _Moved.apply(x, group, _to_heads, _to_slots)


def to_slots(x: Tensor, group: Group) -> Tensor:
    """The other way."""
    return _Moved.apply(x, group, _to_slots, _to_heads)


def _to_heads(x: Tensor, group: Group) -> Tensor:
    return _dealt(x.unflatten(1, (group.size, -1)).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


def _to_slots(x: Tensor, group: Group) -> Tensor:
    return _dealt(x.unflatten(2, (group.size, -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _dealt(parts: Tensor, group: Group) -> Tensor:
    """Part j of rank i as part i of rank j."""
    counts = [parts[0].numel()] * group.size
    return comm.start_all_to_all(parts.flatten(), counts, counts, group).wait().view(parts.shape)


class Heads(nn.Module):
    """Socket: the core of a layer whose heads are dealt to the ranks of `inner` while attention is computed.

    `outer`: a ring over the inner groups, None where one inner group holds whole rows. `members`: the context-parallel
    ranks of the inner group.
    """

    def __init__(self, plain: Causal, inner: Group, members: Sequence[int], outer: Ring | None = None) -> None:
        super().__init__()
        self.plain, self.inner, self.outer, self.members = plain, inner, outer, tuple(members)

    def forward(
        self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, ctx: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_BHSN of the local queries."""
        part, n, ids = part_of(ctx), self.inner.size, ctx.batch.places
        if q_BHSN.shape[1] % n:
            h = q_BHSN.shape[1]
            case = f"an all-to-all deals the {h} query heads of a rank to {n} ranks, and {h} / {n} = {h / n:g}"
            raise refuse("--cp-comm-type a2a", case, "--cp-comm-type p2p")
        copies = n // gcd(k_BKSN.shape[1], n)  # fewer key/value heads than ranks: every rank gets those it needs
        if copies > 1:
            k_BKSN, v_BKSN = (x.repeat_interleave(copies, 1) for x in (k_BKSN, v_BKSN))
        q, k, v = (to_heads(x, self.inner) for x in (q_BHSN, k_BKSN, v_BKSN))
        if sinks_H is not None:
            sinks_H = sinks_H.unflatten(0, (n, -1))[self.inner.index]
        if self.outer is not None:
            runs = [joined([part.runs[r] for r in ranks]) for ranks in self.outer.parts]
            return to_slots(self.outer.among(q, k, v, runs, part.cuts, ids, sinks_H), self.inner)
        there = torch.tensor(slots(joined([part.runs[r] for r in self.members])), device=q.device)
        order = torch.argsort(there)
        q, k, v = (x.index_select(2, order) for x in (q, k, v))
        o = self.plain.over(q, k, v, part.cuts, ids, sinks_H).index_select(2, there)
        return to_slots(o, self.inner)
