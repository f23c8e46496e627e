"""The two MLPs: activation(x U^T) D^T, and activation(x G^T) * (x U^T) D^T with gate and up in one projection.

Legend: D hidden, F feed-forward. Sources: Hendrycks & Gimpel 2016 (GELU), Shazeer 2020 (SwiGLU, GeGLU).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from isotron.core.nn.linear import Linear


class _Gated(torch.autograd.Function):
    """activation(gate) * up of a fused gate|up; keeps only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, smooth: bool) -> Tensor:
        ctx.smooth = smooth
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return _activated(gate, smooth).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        dgate, dup = out.chunk(2, -1)
        torch.mul(dy, _activated(gate, ctx.smooth), out=dup)
        if ctx.smooth:
            torch.ops.aten.gelu_backward.grad_input(torch.mul(dy, up), gate, approximate="tanh", grad_input=dgate)
        else:
            torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up), gate, grad_input=dgate)
        return out, None


def _activated(gate: Tensor, smooth: bool) -> Tensor:
    return gelu(gate, approximate="tanh") if smooth else silu(gate)


def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half, over the last dimension."""
    return _Gated.apply(x, False)


def geglu(x: Tensor) -> Tensor:
    """gelu(first half) * second half, by the approximation with tanh."""
    return _Gated.apply(x, True)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class MLP(nn.Module):
    """Two layers around an activation."""

    def __init__(self, hidden: int, ffn: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn, bias)
        self.down = Linear(ffn, hidden, bias)
        self.activation = ACTIVATIONS[activation]
        self.recompute = False

    def forward(self, x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        h = self.up(x, pre)
        return self.down(h, self.activation) if self.recompute else self.down(self.activation(h))


GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}


class GatedMLP(nn.Module):
    """An MLP with gate and up fused; locally the first half of the fused width is gate. `activation`: of the gate."""

    def __init__(self, hidden: int, ffn: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * ffn, bias)
        self.down = Linear(ffn, hidden, bias)
        self.gated = GATES[activation]
        self.recompute = False

    def forward(self, x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        h = self.gate_up(x, pre)
        return self.down(h, self.gated) if self.recompute else self.down(self.gated(h))
