"""Experts as one autograd operation over rows that lie sorted by expert.

Legend: E experts held here, N rows, D hidden, F feed-forward of one expert (its local part).

For the rows of expert e: y = activation(x G_e^T | x U_e^T) Down_e^T * weight. The row's routing weight is applied
inside, on the narrow side: to the result, and in the backward to dy, where the weight gradient needs it. The work goes
span by span (`grouped.py`): on a CPU the rows of one expert at a time, element by element in blocks that fit its cache.
Weight gradients go straight to their sinks. Local sizes come from the shapes of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import silu

from isotron.core.nn.grouped import Groups, Span, cached
from isotron.core.nn.linear import GradSink, sink_of


class Gate(Protocol):
    """An activation of a fused gate|up with its gradient; both write to `out` where it is given."""

    def forward(self, gate_up: Tensor, out: Tensor) -> None:
        """[N, 2F] -> [N, F]."""
        ...

    def backward(self, gate_up: Tensor, dy: Tensor, out: Tensor) -> None:
        """The gradient of gate_up."""
        ...


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up."""

    def forward(self, gate_up: Tensor, out: Tensor) -> None:
        """[N, F]."""
        gate, up = gate_up.chunk(2, -1)
        torch.mul(silu(gate), up, out=out)

    def backward(self, gate_up: Tensor, dy: Tensor, out: Tensor) -> None:
        """[N, 2F]."""
        gate, up = gate_up.chunk(2, -1)
        dgate, dup = out.chunk(2, -1)
        torch.mul(dy, silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up), gate, grad_input=dgate)


class _Sums:
    """The gradient of stacked matrices [E*O, I]: into their sink, now or later, or a tensor of its own.

    Every span is added once. What is put off keeps its operands.
    """

    def __init__(self, like: Tensor, experts: int, sink: GradSink | None) -> None:
        self.sink, self.shape = sink, (experts, -1, like.shape[1])
        self.found = torch.empty_like(like) if sink is None else None
        self.parts: list[tuple[Span, Tensor, Tensor]] = []

    def add(self, span: Span, dy: Tensor, x: Tensor) -> None:
        """dy^T x of a span's rows."""
        if self.sink is not None and self.sink.later is not None:
            self.parts.append((span, dy.detach(), x.detach()))  # it runs where gradients are recorded
        else:
            self._write(span, dy, x)

    def _write(self, span: Span, dy: Tensor, x: Tensor) -> None:
        if self.found is not None:
            span.outer(dy, x, self.found.view(self.shape), True)
        elif self.sink is not None:
            span.outer(dy, x, self.sink.buffer.view(self.shape), self.sink.fresh)

    def done(self) -> Tensor | None:
        """Every span has been added: what is to be returned where there is no sink."""
        sink = self.sink
        if sink is None:
            return self.found

        def deliver() -> None:
            for part in self.parts:
                self._write(*part)
            sink.fresh = False
            sink.written()

        if sink.later is not None:
            sink.later.append(deliver)
        else:
            deliver()
        return None


class _BiasSums:
    """The same of stacked biases [E*O], in float32 or wider; nothing where there are none."""

    def __init__(self, like: Tensor | None, experts: int, sink: GradSink | None) -> None:
        self.like, self.sink, self.sums_EO = like, sink, torch.empty(0)
        if like is not None:
            wide = torch.promote_types(like.dtype, torch.float32)
            self.sums_EO = torch.zeros(experts, len(like) // experts, dtype=wide, device=like.device)

    def add(self, span: Span, dy: Tensor) -> None:
        """The sum of a span's rows by expert."""
        if self.like is not None:
            span.sums(dy, self.sums_EO)

    def done(self) -> Tensor | None:
        """What is to be returned where there is no sink."""
        if self.like is None:
            return None
        if self.sink is None:
            return self.sums_EO.view(self.like.shape).to(self.like.dtype)
        self.sink.add(self.sums_EO.view(self.like.shape))
        return None


def _at(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
        groups: Groups, gate: Gate, recompute: bool, first: int,
    ) -> Tensor:  # fmt: skip
        e, n, (d, f) = len(groups.counts), len(x), (x.shape[1], w2.shape[1])
        spans = groups.spans(d, f, like=x)
        up, down = w1.view(e, 2 * f, d).mT, w2.view(e, d, f).mT
        # where each span is one expert's they write to their rows, else the one span's results are all there is
        gate_up, y = (x.new_empty(n, width) if len(spans) > 1 else None for width in (2 * f, d))
        act = None if recompute else x.new_empty(n, f)
        for span in spans:
            rows = span.rows
            h = span.product(x[rows], up, _at(gate_up, rows))
            if b1 is not None:
                h += span.of_rows(b1.view(e, -1))
            a = x.new_empty(len(h), f) if act is None else act[rows]
            _activate(gate, h, a)
            out = span.product(a, down, _at(y, rows))
            if b2 is not None:
                out[:, first : first + len(b2) // e] += span.of_rows(b2.view(e, -1))
            out *= weight[rows, None].to(x.dtype)
            gate_up, y = (h, out) if len(spans) == 1 else (gate_up, y)
        ctx.groups, ctx.gate, ctx.first = groups, gate, first
        ctx.sinks = [None if p is None else sink_of(p) for p in (w1, b1, w2, b2)]
        ctx.save_for_backward(x, weight, w1, b1, w2, b2, gate_up, act)
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w1, b1, w2, b2, gate_up, act = ctx.saved_tensors
        gate, dy, e, (d, f) = ctx.gate, dy.contiguous(), len(ctx.groups.counts), (x.shape[1], w2.shape[1])
        spans = ctx.groups.spans(d, f, like=x)
        up, down = w1.view(e, 2 * f, d), w2.view(e, d, f)
        dw1, dw2 = _Sums(w1, e, ctx.sinks[0]), _Sums(w2, e, ctx.sinks[2])
        db1, db2 = _BiasSums(b1, e, ctx.sinks[1]), _BiasSums(b2, e, ctx.sinks[3])
        dweight = torch.empty_like(weight)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] and len(spans) > 1 else None
        for span in spans:
            rows, h, dy_here = span.rows, gate_up[span.rows], dy[span.rows]
            a = _at(act, rows)
            if a is None:
                a = _activate(gate, h, x.new_empty(len(h), f))
            scaled, da, dh = dy_here * weight[rows, None].to(dy.dtype), span.product(dy_here, down), torch.empty_like(h)
            _activation_gradient(gate, h, a, da, weight[rows], dh, dweight[rows])
            dw2.add(span, scaled, a)
            if b2 is not None:
                own = slice(ctx.first, ctx.first + len(b2) // e)
                dweight[rows] += (dy_here[:, own] * span.of_rows(b2.view(e, -1))).sum(-1, dtype=weight.dtype)
                db2.add(span, scaled[:, own])
            dw1.add(span, dh, x[rows])
            db1.add(span, dh)
            if ctx.needs_input_grad[0]:
                part = span.product(dh, up, _at(dx, rows))
                dx = part if len(spans) == 1 else dx
        return dx, dweight, dw1.done(), db1.done(), dw2.done(), db2.done(), *(None,) * 4


def _activate(gate: Gate, h: Tensor, out: Tensor) -> Tensor:
    for part, into in cached(h, out):
        gate.forward(part, into)
    return out


def _activation_gradient(
    gate: Gate, h: Tensor, a: Tensor, da: Tensor, weight: Tensor, dh: Tensor, dweight: Tensor
) -> None:
    """dh and dweight of the activation a of h, whose rows are weighted; da, its gradient without the weights, is used
    up.
    """
    for h_here, a_here, da_here, w_here, dh_here, dw_here in cached(h, a, da, weight, dh, dweight):
        torch.sum(da_here * a_here, -1, dtype=dw_here.dtype, out=dw_here)
        gate.backward(h_here, da_here.mul_(w_here[:, None].to(da.dtype)), dh_here)


class Stacked(nn.Module):
    """The matrices of several experts, one below the other: W_[E*O]I, with biases where asked.

    Calling it gives (weight, bias): whoever waits for weights before a module's forward is heard here too.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias)."""
        return self.weight, self.bias


class Experts(nn.Module):
    """The experts held here. `first`: of the outputs to which this rank adds its part of the biases of `down`; ranks
    that split the width of experts split these by outputs, since their results are added up.
    """

    def __init__(self, experts: int, hidden: int, ffn: int, gate: Gate | None = None, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Stacked(experts, hidden, 2 * ffn, bias)
        self.down = Stacked(experts, ffn, hidden, bias)
        self.gate: Gate = gate or SwiGLU()
        self.hidden, self.recompute, self.first = hidden, False, 0

    def forward(self, x_ND: Tensor, weight_N: Tensor, counts_E: Tensor) -> Tensor:
        """y_ND; `counts_E` says how many consecutive rows each expert has, `weight_N` is float32 or wider."""
        (w1, b1), (w2, b2) = self.gate_up(), self.down()
        held, again = Groups(counts_E), self.recompute
        return _GroupedMLP.apply(x_ND, weight_N, w1, b1, w2, b2, held, self.gate, again, self.first)


def counts_of(experts: Tensor, number: int) -> Tensor:
    """How often each of `number` experts is chosen, int64; entries of `number` or more stand for none."""
    return torch.bincount(experts.flatten(), minlength=number + 1)[:number]


__all__: Sequence[str] = ("Experts", "Gate", "Stacked", "SwiGLU", "counts_of")
