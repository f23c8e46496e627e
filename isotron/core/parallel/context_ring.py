"""Attention over a row whose slots are dealt to ranks: key/value blocks travel in a ring, or are gathered.

Legend: B batch, H query heads, K key/value heads, S local slots, N head size.

Every rank keeps its queries. In the ring the next block is on its way while the present one is worked on, and a rank
stops when no rank needs what would come; in the backward the gradient of a block goes straight to its owner, also while
the next block is worked on. Gathered, all blocks come at once and their gradients are summed and cut.
Source: Liu et al. 2023 (ring attention), Brandon et al. 2023 (zigzag), Llama team 2024 (all-gather).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Part, Places
from isotron.core.errors import refuse
from isotron.core.mesh import Group
from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.nn.kernels import (
    Kernel,
    add_gradients,
    add_sinks,
    add_tiles,
    empty_result,
    sinks_gradient,
    zeros_like_wide,
)
from isotron.core.nn.tiles import Tile
from isotron.core.rows import Cuts, Runs

Plans = tuple[tuple[Tile, ...], ...]  # by the rank whose keys are met


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plans: Plans,
        steps: int,
        kernel: Kernel,
        group: Group,
    ) -> Tensor:
        o, lse = empty_result(q, v, exact=True)
        held = k.contiguous(), v.contiguous()
        for step in range(steps):
            coming = _pass_on(held, group) if step + 1 < steps else ()
            add_tiles(kernel, q, *held, plans[(group.index - step) % group.size], o, lse, begun=step > 0)
            held = _arrived(coming, held)
        lse = add_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.plans, ctx.steps, ctx.kernel, ctx.group = plans, steps, kernel, group
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        group, n = ctx.group, ctx.group.size
        dq, dk, dv = zeros_like_wide(q, k, v)
        held = k.contiguous(), v.contiguous()
        returning: deque[Sequence[comm.Pending]] = deque()
        for step in range(ctx.steps):
            coming = _pass_on(held, group) if step + 1 < ctx.steps else ()
            owner, worker = (group.index - step) % n, (group.index + step) % n
            part = (dk, dv) if step == 0 else zeros_like_wide(*held)
            add_gradients(ctx.kernel, do, (q, *held), (o, lse), ctx.plans[owner], (dq, *part))  # type: ignore[arg-type]
            if step:
                sends = [(x.to(k.dtype), group.ranks[owner]) for x in part]
                receives = [(torch.empty_like(x), group.ranks[worker]) for x, _ in sends]
                returning.append(comm.exchange(sends, receives, group))
            if len(returning) > 1:  # what is under way is memory: of two steps, however many ranks there are
                _returned(returning.popleft(), dk, dv)
            held = _arrived(coming, held)
        for pending in returning:
            _returned(pending, dk, dv)
        dsinks = sinks_gradient(do, o, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


def _pass_on(held: tuple[Tensor, Tensor], group: Group) -> Sequence[comm.Pending]:
    """Send a block to the next rank and receive the previous rank's."""
    after, before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
    return comm.exchange([(x, after) for x in held], [(torch.empty_like(x), before) for x in held], group)


def _arrived(coming: Sequence[comm.Pending], held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The block that came; the one that was sent is free afterwards."""
    if not coming:
        return held
    _, _, k, v = (p.wait() for p in coming)
    return k, v


def _returned(pending: Sequence[comm.Pending], dk: Tensor, dv: Tensor) -> None:
    """Add what another rank found of the gradients of the own block."""
    *sent, dk_part, dv_part = pending
    dk.add_(dk_part.wait())
    dv.add_(dv_part.wait())
    for p in sent:
        p.wait()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plans: Plans, kernel: Kernel, group: Group
    ) -> Tensor:
        coming = [comm.start_all_gather(x[None], group, 0) for x in (k, v)]
        o, lse = empty_result(q, v, exact=True)
        add_tiles(kernel, q, k, v, plans[group.index], o, lse)
        every_k, every_v = (p.wait() for p in coming)
        for rank, plan in enumerate(plans):
            if rank != group.index:
                add_tiles(kernel, q, every_k[rank], every_v[rank], plan, o, lse, begun=True)
        lse = add_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.plans, ctx.kernel, ctx.group = plans, kernel, group
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        coming = [comm.start_all_gather(x[None], ctx.group, 0) for x in (k, v)]
        (dq,) = zeros_like_wide(q)
        every_k, every_v = (p.wait() for p in coming)
        every_dk, every_dv = zeros_like_wide(every_k, every_v)
        for rank, plan in enumerate(ctx.plans):
            sums = (dq, every_dk[rank], every_dv[rank])
            add_gradients(ctx.kernel, do, (q, every_k[rank], every_v[rank]), (o, lse), plan, sums)
        leaving = [comm.start_reduce_scatter(x.to(k.dtype), ctx.group, 0) for x in (every_dk, every_dv)]
        dk, dv = (p.wait()[0] for p in leaving)
        return dq.to(q.dtype), dk, dv, sinks_gradient(do, o, lse, sinks), None, None, None


class Ring(nn.Module):
    """Socket: the core of a layer whose rows are dealt to the ranks of `group`. `gather`: all blocks at once.

    `parts`: for each rank of the group, the context-parallel ranks whose slots it holds.
    """

    def __init__(self, plain: Causal, group: Group, parts: Sequence[Sequence[int]], gather: bool = False) -> None:
        super().__init__()
        self.plain, self.group, self.gather = plain, group, gather
        self.parts = tuple(map(tuple, parts))

    def forward(
        self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, ctx: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_BHSN of the local queries."""
        part = part_of(ctx)
        return self.among(q_BHSN, k_BKSN, v_BKSN, part.runs, part.cuts, ctx.batch.places, sinks_H)

    def among(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: Sequence[Runs],
        cuts: Cuts | None,
        places: Places,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """o of the local queries; `runs` of each rank of the group."""
        kernel, n, here = self.plain.kernel(q, places), self.group.size, self.group.index
        batch = len(q)
        plans = tuple(self.plain.plan(runs[here], runs[j], cuts, batch, kernel) for j in range(n))
        if self.gather:
            return _Gathered.apply(q, k, v, sinks_H, plans, kernel, self.group)
        steps = n if cuts is None and not self.plain.window else self._reach(runs, cuts, batch, kernel)
        return _Ring.apply(q, k, v, sinks_H, plans, steps, kernel, self.group)

    def _reach(self, runs: Sequence[Runs], cuts: Cuts | None, batch: int, kernel: Kernel) -> int:
        """Steps after which no rank meets keys that it needs; the same number on every rank."""
        n = self.group.size
        needed = (
            step
            for step in range(n)
            if any(self.plain.plan(runs[i], runs[(i - step) % n], cuts, batch, kernel) for i in range(n))
        )
        return max(needed, default=0) + 1


def part_of(ctx: Context) -> Part:
    """What the batch says of its rows; refused for a batch that was not dealt to ranks."""
    if ctx.batch.part is None:
        raise refuse(
            "a batch of whole rows in a model with context parallelism",
            "its attention layers hold a part of every row",
            "batches cut by isotron.core.parallel.context.local_batch, as ParallelModel does",
            exit_code=1,
        )
    return ctx.batch.part
