"""Output layer and cross-entropy as one operation that never holds the logits of the whole batch.

Legend: N tokens (B x S), D hidden, V vocabulary rows held here, C tokens of one chunk.

Every token's weight in the loss is known before the backward, so the gradients of a chunk are formed while its logits
are at hand: three matrix products per chunk, no logits kept, none computed twice. With a vocabulary split over ranks
each rank holds its columns and the ranks exchange three numbers per token. Padding rows are left out of the sums.

Where a pipeline table has the weight gradient stand apart, the gradient of the logits waits for it: kept as far as
`Head.kept_bytes` reaches, and beyond that formed again there from the layer's input, for a fourth matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.errors import refuse
from isotron.core.nn import logits as chunked
from isotron.core.nn.linear import GradSink, Socket, sink_of
from isotron.core.nn.logits import Accumulator, Chunks, Sums, Vocab


class _Waiting:
    """The weight gradient of one call, put off: its input, and of each chunk the logits' gradient or how to form it
    again.
    """

    def __init__(self, chunks: Chunks, x: Tensor, head: Head) -> None:
        self.chunks, self.x, self.enter, self.at_hand = chunks, x.detach(), head.enter, head.at_hand
        self.left = head.kept_bytes
        self.parts: list[tuple[slice, Tensor | None, Sums]] = []

    def add(self, part: slice, logits: Tensor, sums: Sums) -> bool:
        """Note a chunk; whether its logits are kept."""
        self.left -= logits.numel() * logits.element_size()
        keeps = self.left >= 0
        self.parts.append((part, logits if keeps else None, sums))
        return keeps

    @torch.no_grad()
    def form(self, total: Accumulator) -> None:
        """Add every chunk's part."""
        x = self.x if self.enter is None else self.enter.forward(self.x).wait()
        flat = x.reshape(-1, x.shape[-1])
        missing = any(logits is None for _, logits, _ in self.parts)
        with self.at_hand() if missing else nullcontext():
            buffer = self.chunks.buffer() if missing else flat
            for part, logits, sums in self.parts:
                if logits is None:
                    logits = self.chunks.gradient(part, flat[part], buffer, sums)[0]
                total.add(logits, flat[part])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, mask: Tensor, weight: float, head: Head
    ) -> Tensor:
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        full = x if head.enter is None else head.enter.forward(x).wait()
        flat, sink = full.reshape(-1, full.shape[-1]), sink_of(w)
        scale = weight if sink is not None else 1.0
        step = min(len(flat), chunked.tokens(w))
        real, socket = (w[: head.real], None if b is None else b[: head.real]), (head.vocab, head.softcap)
        chunks = Chunks(*real, labels.flatten(), mask.flatten(), scale, step, *socket)
        waiting = _Waiting(chunks, x, head) if need_w and sink is not None and sink.defers else None
        dw = Accumulator(w, sink) if need_w and waiting is None else None
        dx = torch.empty_like(flat) if need_x else None
        db = torch.zeros(b.shape, dtype=chunks.wide, device=x.device) if b is not None and need_b else None
        total = torch.zeros((), dtype=chunks.wide, device=x.device)
        buffer = None
        for part in chunks:
            buffer = chunks.buffer() if buffer is None else buffer
            logits, losses, sums = chunks.gradient(part, flat[part], buffer)
            m = chunks.mask_N[part]
            total += torch.where(m != 0, losses * m, 0).sum()
            if dx is not None:
                chunks.input_gradient(logits, dx[part])
            if db is not None:
                db[: head.real] += logits.sum(0, dtype=chunks.wide)
            if waiting is not None and waiting.add(part, logits, sums):
                buffer = None
            elif dw is not None:
                dw.add(logits, flat[part])
        ctx.enter, ctx.scale, ctx.sink, ctx.waiting = head.enter, scale, sink if need_w else None, waiting
        ctx.bias_sink = None if b is None else sink_of(b)
        formed = None if dw is None or ctx.sink is not None else dw.buffer
        ctx.save_for_backward(None if dx is None else dx.view_as(full), formed, db)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = ctx.saved_tensors
        if ctx.sink is not None:
            if dy.device.type == "cpu" and abs(float(dy) - ctx.scale) > 1e-6 * abs(ctx.scale):
                raise refuse(
                    f"a loss weight of {float(dy)} in backward",
                    f"the weight gradient was formed with the weight {ctx.scale} given to forward",
                    "give the final weight to forward and call backward with the same",
                    exit_code=1,
                )
            _deliver(ctx.sink, ctx.waiting)
            ctx.waiting = None
        if dx is not None:
            dx = dx * (dy / ctx.scale).to(dx.dtype) if ctx.scale else dx
            dx = dx if ctx.enter is None else ctx.enter.backward(dx).wait()
        db = None if db is None else _bias_gradient(ctx.bias_sink, db * (dy / ctx.scale) if ctx.scale else db, dy.dtype)
        return dx, None if dw is None else dw * dy.to(dw.dtype), db, *(None,) * 4


def _bias_gradient(sink: GradSink | None, db: Tensor, dtype: torch.dtype) -> Tensor | None:
    """To its sink, where it has one."""
    if sink is None:
        return db.to(dtype)
    sink.add(db)
    return None


def _deliver(sink: GradSink, waiting: _Waiting | None) -> None:
    """The weight gradient: formed in the forward already, or from what was kept, now or in its own action."""

    def form() -> None:
        if waiting is not None:
            waiting.form(Accumulator(waiting.chunks.w_VD, sink))
        sink.written()

    if waiting is None or sink.later is None:
        form()
    else:
        sink.later.append(form)


class Head(nn.Module):
    """Output layer W_VD, with bias_V where there is one, and its loss. Sockets: `enter` for x, `vocab` for the split
    vocabulary, `at_hand` around what needs the weights after the backward. `kept_bytes`: of logits' gradients that wait
    for a weight gradient put off.

    `softcap` above 0: logits are softcap x tanh(logit / softcap). Source: Gemma team 2024 (Gemma 2), section 2.
    """

    def __init__(self, hidden: int, rows: int, softcap: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.real, self.softcap, self.kept_bytes = rows, softcap, chunked.CHUNK_BYTES
        self.enter: Socket | None = None
        self.vocab: Vocab | None = None
        self.at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x_BSD: Tensor, labels_BS: Tensor, mask_BS: Tensor, weight: float = 1.0) -> Tensor:
        """Sum over tokens of mask x cross-entropy. `weight` is the factor with which backward will be called."""
        given: tuple[Tensor, Tensor | None] = self.weight, self.bias
        if not torch.is_grad_enabled():  # no gradients are formed in evaluation
            given = self.weight.detach(), None if self.bias is None else self.bias.detach()
        return _LinearCrossEntropy.apply(x_BSD, *given, labels_BS, mask_BS, weight, self)

    def held(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the rows of the vocabulary that are held here, without padding."""
        return self.weight[: self.real], None if self.bias is None else self.bias[: self.real]

    def logits(self, x_BSD: Tensor) -> Tensor:
        """[B, S, real rows held here]."""
        full = x_BSD if self.enter is None else self.enter.forward(x_BSD).wait()
        logits = nn.functional.linear(full, *self.held())
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
