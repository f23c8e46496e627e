"""Output layer and cross-entropy as one operation that never holds the logits of the whole batch.

Legend: N tokens (B x S), D hidden, V vocabulary rows held here, C tokens of one chunk.

Every token's weight in the loss is known before the backward, so the gradients of a chunk are formed while its logits are
at hand: three matrix products per chunk, no logits kept, none computed twice. With a vocabulary split over ranks each rank
holds its columns and the ranks exchange three numbers per token. Padding rows are left out of the sums.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.errors import refuse
from isotron.core.nn.linear import GradSink, Socket, sink_of

CHUNK_BYTES = 64 << 20


class Vocab(Protocol):
    """Socket: how the ranks that split a vocabulary meet."""

    first: int

    def gather(self, x: Tensor) -> Tensor:
        """Stack every rank's x: [ranks, *x.shape], in rank order."""
        ...


def _chunk_probabilities(logits: Tensor, labels: Tensor, vocab: Vocab | None) -> tuple[Tensor, Tensor]:
    """Per-token losses [C] and probabilities [C, V] minus one at the label, in float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    local = labels if vocab is None else labels - vocab.first
    inside = (local >= 0) & (local < logits.shape[1])
    at = local.clamp(0, max(logits.shape[1] - 1, 0))[:, None]
    if logits.shape[1] == 0:  # this rank holds padding only
        top = torch.full_like(labels, -torch.inf, dtype=wide)
        total, target, p = torch.zeros_like(top), torch.zeros_like(top), logits.to(wide)
    else:
        target = torch.gather(logits, 1, at)[:, 0].to(wide).masked_fill(~inside, 0)
        top = logits.amax(1).to(wide)
        p = torch.softmax(logits, 1, dtype=wide)
        total = 1 / p.amax(1)  # the largest probability is exp(0) / total
    if vocab is None:
        lse = top + total.log()
    else:
        tops, totals, targets = vocab.gather(torch.stack((top, total, target))).unbind(1)
        highest = tops.amax(0)
        everything = (totals * (tops - highest).exp()).sum(0)
        lse, target = highest + everything.log(), targets.sum(0)
        p.mul_((total * (top - highest).exp() / everything)[:, None])
    if logits.shape[1]:
        p.scatter_add_(1, at, inside[:, None].to(wide).neg_())
    return lse - target, p


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, labels: Tensor, mask: Tensor, weight: float, real: int, enter: Any, vocab: Any
    ) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        full = x if enter is None else enter.forward(x).wait()
        flat, y, m = full.reshape(-1, full.shape[-1]), labels.flatten(), mask.flatten()
        sink = sink_of(w)
        dx = torch.empty_like(flat) if need_x else None
        dw = _Accumulator(w, sink) if need_w else None
        scale = weight if sink is not None else 1.0
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        step = max(16, CHUNK_BYTES // (4 * max(1, w.shape[0])))
        for start in range(0, flat.shape[0], step):
            part = slice(start, start + step)
            logits = flat[part] @ w[:real].t()
            losses, p = _chunk_probabilities(logits, y[part], vocab)
            total += torch.where(m[part] != 0, losses * m[part], 0).sum()
            row = (m[part] * scale).to(p.dtype)[:, None]
            rows = flat[part]
            if p.dtype == w.dtype:  # scaling the narrow side costs less than a pass over the probabilities
                rows, after = rows * row, row
            else:  # 16 bits: scale before rounding, or small probabilities vanish
                p, after = p.mul_(row).to(w.dtype), None
            if dx is not None:
                torch.mm(p, w[:real], out=dx[part])
                if after is not None:
                    dx[part].mul_(after)
            if dw is not None:
                dw.add(p, rows, real)
        ctx.enter, ctx.scale, ctx.in_sink = enter, scale, sink is not None and need_w
        kept = None if dw is None or ctx.in_sink else dw.buffer
        ctx.save_for_backward(None if dx is None else dx.view_as(full), kept)
        if dw is not None and sink is not None:
            ctx.sink = sink
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if ctx.in_sink:
            if dy.device.type == "cpu" and abs(float(dy) - ctx.scale) > 1e-6 * abs(ctx.scale):
                raise refuse(
                    f"a loss weight of {float(dy)} in backward",
                    f"the weight gradient was formed with the weight {ctx.scale} given to forward",
                    "give the final weight to forward and call backward with the same",
                    exit_code=1,
                )
            ctx.sink.written()
        if dx is not None:
            dx = dx * (dy / ctx.scale).to(dx.dtype) if ctx.scale else dx
            dx = dx if ctx.enter is None else ctx.enter.backward(dx).wait()
        return dx, None if dw is None else dw * dy.to(dw.dtype), *(None,) * 6


class _Accumulator:
    """Adds p_CV^T x_CD over the chunks into a sink, or into a tensor of its own."""

    def __init__(self, w: Tensor, sink: GradSink | None) -> None:
        self.sink = sink
        if sink is not None:
            sink.clear_if_fresh()
        self.buffer = torch.zeros_like(w) if sink is None else sink.buffer

    def add(self, p: Tensor, x: Tensor, real: int) -> None:
        """`real` rows of the buffer are vocabulary, the rest padding."""
        rows = self.buffer[:real]
        if rows.dtype == p.dtype:
            rows.addmm_(p.t(), x)
        else:
            rows.add_(p.t() @ x)


class Head(nn.Module):
    """Output layer W_VD with its loss. Sockets: `enter` for x, `vocab` for the split vocabulary."""

    def __init__(self, hidden: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.real = rows
        self.enter: Socket | None = None
        self.vocab: Vocab | None = None

    def forward(self, x_BSD: Tensor, labels_BS: Tensor, mask_BS: Tensor, weight: float = 1.0) -> Tensor:
        """Sum over tokens of mask x cross-entropy. `weight` is the factor with which backward will be called."""
        return _LinearCrossEntropy.apply(
            x_BSD, self.weight, labels_BS, mask_BS, weight, self.real, self.enter, self.vocab
        )

    def logits(self, x_BSD: Tensor) -> Tensor:
        """[B, S, real rows held here]."""
        full = x_BSD if self.enter is None else self.enter.forward(x_BSD).wait()
        return nn.functional.linear(full, self.weight[: self.real])
