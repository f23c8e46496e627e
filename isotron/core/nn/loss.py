"""Output layer and cross-entropy as one operation that never holds the logits of the whole batch.

Legend: N tokens (B x S), D hidden, V vocabulary rows held here, C tokens of one chunk.

Every token's weight in the loss is known before the backward, so the gradients of a chunk are formed while its logits
are at hand: three matrix products per chunk, no logits kept, none computed twice. With a vocabulary split over ranks
each rank holds its columns and the ranks exchange three numbers per token. Padding rows are left out of the sums.

Where a pipeline table has the weight gradient stand apart, and the logits of a microbatch are one chunk, their gradient
is kept until then instead.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.errors import refuse
from isotron.core.nn.linear import GradSink, Socket, sink_of

CHUNK_BYTES = 64 << 20  # logits at hand: wide enough for good matrix products
BLOCK_BYTES = 4 << 20  # logits in float32 at a time: small enough for the cache


class Vocab(Protocol):
    """Socket: how the ranks that split a vocabulary meet."""

    @property
    def first(self) -> int:
        """The global id of the first row held here."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Stack every rank's x: [ranks, *x.shape], in rank order."""
        ...


def _local_softmax(logits: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of logits_CV in place, times `row` [C, 1] if given; the highest logit and the sum of exp(l - highest)
    [C].

    In float32 or wider; 16-bit logits pass through a small wide block.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    top, total = torch.empty(2, len(logits), dtype=wide, device=logits.device)
    step = max(1, BLOCK_BYTES // (4 * logits.shape[1]))
    scratch = torch.empty(0 if logits.dtype == wide else step, logits.shape[1], dtype=wide, device=logits.device)
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        block = logits[part] if logits.dtype == wide else scratch[: len(logits[part])].copy_(logits[part])
        top[part] = block.amax(1)
        torch.softmax(block, 1, out=block)
        total[part] = 1 / block.amax(1)  # the largest probability is exp(0) / total
        if row is not None:
            block.mul_(row[part])
        if block.dtype != logits.dtype:
            logits[part] = block
    return top, total


def _loss_gradient(logits: Tensor, labels: Tensor, row: Tensor | None, vocab: Vocab | None) -> Tensor:
    """Per-token losses [C]; logits_CV become (softmax - one at the label) x row, in place."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    width = logits.shape[1]
    local = labels if vocab is None else labels - vocab.first
    inside = (local >= 0) & (local < width)
    at = local.clamp(0, max(width - 1, 0))[:, None]
    if width:
        target = torch.gather(logits, 1, at)[:, 0].to(wide).masked_fill(~inside, 0)
        top, total = _local_softmax(logits, row)
    else:  # this rank holds padding only
        top = torch.full(labels.shape, -torch.inf, dtype=wide, device=labels.device)
        target = total = torch.zeros_like(top)
    if vocab is None:
        lse = top + total.log()
    else:
        tops, totals, targets = vocab.gather(torch.stack((top, total, target))).unbind(1)
        highest = tops.amax(0)
        everything = (totals * (tops - highest).exp()).sum(0)
        lse, target = highest + everything.log(), targets.sum(0)
        logits.mul_((total * (top - highest).exp() / everything)[:, None])
    if width:
        at_label = torch.expm1(target - lse)  # exact where the probability is near one
        at_label = at_label if row is None else at_label * row[:, 0]
        place = torch.arange(len(at), device=at.device), at[:, 0]
        logits[place] = torch.where(inside, at_label.to(logits.dtype), logits[place])
    return lse - target


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        labels: Tensor,
        mask: Tensor,
        weight: float,
        real: int,
        enter: Any,
        vocab: Any,
        softcap: float,
    ) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        full = x if enter is None else enter.forward(x).wait()
        flat, y, m = full.reshape(-1, full.shape[-1]), labels.flatten(), mask.flatten()
        sink = sink_of(w)
        dx = torch.empty_like(flat) if need_x else None
        scale = weight if sink is not None else 1.0
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        step = min(len(flat), max(16, CHUNK_BYTES // (w.element_size() * max(1, w.shape[0]))))
        buffer = torch.empty(step, real, dtype=flat.dtype, device=flat.device)
        # float16 has no room for small probabilities times a small weight: they are scaled before they are rounded
        inside = w.dtype == torch.float16
        ctx.kept = None
        waits = need_w and sink is not None and sink.defers and len(flat) <= step
        dw = _Accumulator(w, sink) if need_w and not waits else None
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            rows, row = flat[part], m[part].to(total.dtype)[:, None]
            logits = torch.mm(rows, w[:real].t(), out=buffer[: len(rows)])
            slope = _cap(logits, softcap) if softcap else None
            losses = _loss_gradient(logits, y[part], row * scale if inside else None, vocab)
            if slope is not None:
                logits.mul_(slope)
            total += torch.where(m[part] != 0, losses * m[part], 0).sum()
            if dx is not None:
                torch.mm(logits, w[:real], out=dx[part])
                if not inside:
                    dx[part].mul_(row * scale)
            if need_w:
                factors = logits, rows if inside else rows * row.to(rows.dtype), real, 1.0 if inside else scale
                if dw is None:
                    ctx.kept = factors
                else:
                    dw.add(*factors)
        ctx.enter, ctx.scale, ctx.sink = enter, scale, sink if need_w else None
        formed = None if dw is None or ctx.sink is not None else dw.buffer
        ctx.save_for_backward(None if dx is None else dx.view_as(full), formed)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if ctx.sink is not None:
            if dy.device.type == "cpu" and abs(float(dy) - ctx.scale) > 1e-6 * abs(ctx.scale):
                raise refuse(
                    f"a loss weight of {float(dy)} in backward",
                    f"the weight gradient was formed with the weight {ctx.scale} given to forward",
                    "give the final weight to forward and call backward with the same",
                    exit_code=1,
                )
            _deliver(ctx.sink, ctx.kept)
            ctx.kept = None
        if dx is not None:
            dx = dx * (dy / ctx.scale).to(dx.dtype) if ctx.scale else dx
            dx = dx if ctx.enter is None else ctx.enter.backward(dx).wait()
        return dx, None if dw is None else dw * dy.to(dw.dtype), *(None,) * 7


def _deliver(sink: GradSink, kept: tuple[Tensor, Tensor, int, float] | None) -> None:
    """The weight gradient: formed in the forward already, or from what was kept, now or in its own action."""

    def form() -> None:
        if kept is not None:
            _Accumulator(None, sink).add(*kept)
        sink.written()

    if kept is None or sink.later is None:
        form()
    else:
        sink.later.append(form)


def _cap(logits: Tensor, softcap: float) -> Tensor:
    """Bounds logits_CV in place: softcap x tanh(logit / softcap). The derivative of that, [C, V]."""
    torch.tanh(logits.div_(softcap), out=logits)
    slope = 1 - logits.square()
    logits.mul_(softcap)
    return slope


class _Accumulator:
    """Adds scale x p_CV^T x_CD over the chunks into a sink, or into a tensor of its own."""

    def __init__(self, w: Tensor | None, sink: GradSink | None) -> None:
        if sink is None:
            if w is None:
                raise ValueError("there is neither a sink nor a weight to make a buffer for")
            self.buffer, self.empty = torch.empty_like(w), True
        else:
            self.buffer, self.empty, sink.fresh = sink.buffer, sink.fresh, False

    def add(self, p: Tensor, x: Tensor, real: int, scale: float) -> None:
        """`real` rows of the buffer are vocabulary, the rest padding."""
        rows = self.buffer[:real]
        if self.empty:
            self.buffer[real:].zero_()
        if rows.dtype == p.dtype:
            torch.addmm(rows, p.t(), x, beta=0 if self.empty else 1, alpha=scale, out=rows)
        elif self.empty:
            torch.mul(p.t() @ x, scale, out=rows)
        else:
            rows.add_(p.t() @ x, alpha=scale)
        self.empty = False


class Head(nn.Module):
    """Output layer W_VD with its loss. Sockets: `enter` for x, `vocab` for the split vocabulary.

    `softcap` above 0: logits are softcap x tanh(logit / softcap). Source: Gemma team 2024 (Gemma 2), section 2.
    """

    def __init__(self, hidden: int, rows: int, softcap: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.real, self.softcap = rows, softcap
        self.enter: Socket | None = None
        self.vocab: Vocab | None = None

    def forward(self, x_BSD: Tensor, labels_BS: Tensor, mask_BS: Tensor, weight: float = 1.0) -> Tensor:
        """Sum over tokens of mask x cross-entropy. `weight` is the factor with which backward will be called."""
        w = self.weight if torch.is_grad_enabled() else self.weight.detach()  # no gradients are formed in evaluation
        sockets = self.enter, self.vocab
        return _LinearCrossEntropy.apply(x_BSD, w, labels_BS, mask_BS, weight, self.real, *sockets, self.softcap)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """[B, S, real rows held here]."""
        full = x_BSD if self.enter is None else self.enter.forward(x_BSD).wait()
        logits = nn.functional.linear(full, self.weight[: self.real])
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
