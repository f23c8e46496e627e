"""The two MLPs: activation(x U^T) D^T, and silu(x G^T) * (x U^T) D^T with gate and up in one projection.

Legend: D hidden, F feed-forward. Sources: Hendrycks & Gimpel 2016 (GELU), Shazeer 2020 (SwiGLU).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import gelu, silu

from isotron.core.nn.linear import Linear


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of a fused gate|up; keeps only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        dgate, dup = out.chunk(2, -1)
        torch.mul(dy, silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up), gate, grad_input=dgate)
        return out


def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half, over the last dimension."""
    return _SwiGLU.apply(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh")}


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


class GatedMLP(nn.Module):
    """SwiGLU with gate and up fused; locally the first half of the fused width is gate."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * ffn)
        self.down = Linear(ffn, hidden)
        self.recompute = False

    def forward(self, x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        h = self.gate_up(x, pre)
        return self.down(h, swiglu) if self.recompute else self.down(swiglu(h))
