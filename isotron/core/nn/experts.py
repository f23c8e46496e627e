"""Experts as one autograd operation over rows that lie sorted by expert.

Legend: E experts held here, N rows, D hidden, F feed-forward of one expert (its local part), O outputs, I inputs.

For the rows of expert e: y = (activation(x G_e^T | x U_e^T) * weight) Down_e^T. The row's routing weight is applied
inside, so that neither the weighted nor the unweighted output is kept. The matrix products of all experts are one
grouped call where the device has one, else one product per expert into its place; both give the same numbers up to
rounding. Weight gradients go straight to their sinks. Local sizes come from the shapes of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import silu

from isotron.core.device import has_grouped_matmul
from isotron.core.nn.linear import GradSink, add_narrow, sink_of


class Gate(Protocol):
    """An activation of a fused gate|up with its gradient."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[N, 2F] -> [N, F]."""
        ...

    def backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        """The gradient of gate_up."""
        ...


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[N, F]."""
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)

    def backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        """[N, 2F]."""
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, -1)
        torch.mul(dy, silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up), gate, grad_input=dgate)
        return out


@dataclass(frozen=True)
class Groups:
    """How many consecutive rows belong to each expert."""

    counts: Tensor  # [E], int64

    def spans(self) -> list[tuple[int, int]]:
        """(first row, past the last row) of each expert, on the host."""
        return list(pairwise(accumulate(self.counts.tolist(), initial=0)))

    def offsets(self) -> Tensor:
        """Past the last row of each expert, as grouped products take it."""
        return self.counts.cumsum(0).to(torch.int32)


def _fits(*operands: Tensor) -> bool:
    """Whether the device's grouped product takes these: rows of whole 16 bytes."""
    return has_grouped_matmul(operands[0].device, operands[0].dtype) and all(
        t.shape[-1] * t.element_size() % 16 == 0 for t in operands
    )


def grouped_matmul(x_NI: Tensor, w_EIO: Tensor, groups: Groups) -> Tensor:
    """Rows of each expert times its matrix: [N, O]."""
    if _fits(x_NI, w_EIO if w_EIO.is_contiguous() else w_EIO.mT):
        return torch._grouped_mm(x_NI, w_EIO, offs=groups.offsets())
    y = x_NI.new_empty(len(x_NI), w_EIO.shape[2])
    for w, (a, b) in zip(w_EIO, groups.spans(), strict=True):
        torch.mm(x_NI[a:b], w, out=y[a:b])
    return y


def _outer(dy_NO: Tensor, x_NI: Tensor, groups: Groups, out_EOI: Tensor, fresh: bool) -> None:
    """Add each expert's dy^T x to its matrix; with `fresh` it replaces what is there."""
    if _fits(dy_NO, x_NI):
        product = torch._grouped_mm(dy_NO.t(), x_NI, offs=groups.offsets())
        out_EOI.copy_(product) if fresh else add_narrow(out_EOI, product)
        return
    for out, (a, b) in zip(out_EOI, groups.spans(), strict=True):
        if out.dtype == x_NI.dtype and b > a:
            torch.addmm(out, dy_NO[a:b].t(), x_NI[a:b], beta=0 if fresh else 1, out=out)
        elif b > a:
            product = dy_NO[a:b].t() @ x_NI[a:b]
            out.copy_(product) if fresh else add_narrow(out, product)
        elif fresh:
            out.zero_()


def _weight_gradient(sink: GradSink | None, like: Tensor, dy_NO: Tensor, x_NI: Tensor, groups: Groups) -> Tensor | None:
    """The gradient of stacked matrices [E*O, I]: into the sink, now or later, or returned."""
    shape = (len(groups.counts), -1, like.shape[1])
    if sink is None:
        out = torch.empty_like(like)
        _outer(dy_NO, x_NI, groups, out.view(shape), fresh=True)
        return out

    dy_NO, x_NI = dy_NO.detach(), x_NI.detach()  # put off, it runs where gradients are recorded

    def deliver() -> None:
        _outer(dy_NO, x_NI, groups, sink.buffer.view(shape), sink.fresh)
        sink.fresh = False
        sink.written()

    if sink.later is not None:
        sink.later.append(deliver)
    else:
        deliver()
    return None


def _bias_gradient(sink: GradSink | None, like: Tensor | None, dy_NO: Tensor, groups: Groups) -> Tensor | None:
    if like is None:
        return None
    wide = torch.promote_types(dy_NO.dtype, torch.float32)
    rows = dy_NO.new_zeros(len(groups.counts), dy_NO.shape[1], dtype=wide)
    rows.index_add_(0, _expert_of_row(groups), dy_NO.to(wide))
    if sink is None:
        return rows.view_as(like).to(like.dtype)
    sink.add(rows.view(like.shape))
    return None


def _expert_of_row(groups: Groups) -> Tensor:
    n = groups.counts
    return torch.repeat_interleave(torch.arange(len(n), device=n.device), n)


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
        groups: Groups, gate: Gate, recompute: bool,
    ) -> Tensor:  # fmt: skip
        e = len(groups.counts)
        gate_up = grouped_matmul(x, w1.view(e, -1, w1.shape[1]).mT, groups)
        if b1 is not None:
            gate_up += b1.view(e, -1)[_expert_of_row(groups)]
        act = gate.forward(gate_up)
        h = act * weight[:, None].to(act.dtype)
        y = grouped_matmul(h, w2.view(e, -1, w2.shape[1]).mT, groups)
        if b2 is not None:
            y += b2.view(e, -1)[_expert_of_row(groups)] * weight[:, None].to(y.dtype)
        ctx.groups, ctx.gate = groups, gate
        ctx.sinks = [None if p is None else sink_of(p) for p in (w1, b1, w2, b2)]
        ctx.save_for_backward(x, weight, w1, b1, w2, b2, gate_up, None if recompute else act)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w1, b1, w2, b2, gate_up, act = ctx.saved_tensors
        groups, sinks, e = ctx.groups, ctx.sinks, len(ctx.groups.counts)
        act = ctx.gate.forward(gate_up) if act is None else act
        dy, column = dy.contiguous(), weight[:, None].to(dy.dtype)
        dh = grouped_matmul(dy, w2.view(e, -1, w2.shape[1]), groups)
        wide = weight.dtype
        dweight = (dh * act).sum(-1, dtype=wide)
        if b2 is not None:
            dweight += (dy * b2.view(e, -1)[_expert_of_row(groups)]).sum(-1, dtype=wide)
        dw2 = _weight_gradient(sinks[2], w2, dy, act * column, groups)
        db2 = _bias_gradient(sinks[3], b2, dy * column, groups) if b2 is not None else None
        dgate_up = ctx.gate.backward(gate_up, dh.mul_(column))
        dw1 = _weight_gradient(sinks[0], w1, dgate_up, x, groups)
        db1 = _bias_gradient(sinks[1], b1, dgate_up, groups)
        dx = grouped_matmul(dgate_up, w1.view(e, -1, w1.shape[1]), groups) if ctx.needs_input_grad[0] else None
        return dx, dweight, dw1, db1, dw2, db2, None, None, None


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
    """The experts held here."""

    def __init__(self, experts: int, hidden: int, ffn: int, gate: Gate | None = None, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Stacked(experts, hidden, 2 * ffn, bias)
        self.down = Stacked(experts, ffn, hidden, bias)
        self.gate: Gate = gate or SwiGLU()
        self.recompute = False

    def forward(self, x_ND: Tensor, weight_N: Tensor, counts_E: Tensor) -> Tensor:
        """y_ND; `counts_E` says how many consecutive rows each expert has, `weight_N` is float32 or wider."""
        (w1, b1), (w2, b2) = self.gate_up(), self.down()
        return _GroupedMLP.apply(x_ND, weight_N, w1, b1, w2, b2, Groups(counts_E), self.gate, self.recompute)


def counts_of(experts: Tensor, number: int) -> Tensor:
    """How often each of `number` experts is chosen, int64; entries of `number` or more stand for none."""
    return torch.bincount(experts.flatten(), minlength=number + 1)[:number]


__all__: Sequence[str] = ("Experts", "Gate", "Groups", "Stacked", "SwiGLU", "counts_of", "grouped_matmul")
