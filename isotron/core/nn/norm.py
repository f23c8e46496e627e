"""RMSNorm and LayerNorm over the last dimension D, statistics in float32 or wider, results in the type of the gain.

One autograd operation each: it keeps the input and one or two numbers per token. Gains are sent to their `GradSink`
when they have one. Sources: Zhang & Sennrich 2019 (RMSNorm), Ba et al. 2016 (LayerNorm).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.nn.linear import GradSink, sink_of


def _deliver(sink: GradSink | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    if sink is None:
        return grad.to(dtype)
    sink.add(grad)
    return None


class Across(Protocol):
    """Socket of a norm over a width that is split over ranks, each part held by `replicas` of them."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x."""
        ...


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, offset: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = (length.square() / x.shape[-1] + eps).rsqrt_()
        ctx.sink, ctx.offset = sink_of(gain), offset  # a recomputed forward has a copy of the gain, without a sink
        ctx.save_for_backward(x, gain, inverse)
        return _scaled(x, inverse, gain, offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        wide = inverse.dtype
        dy_wide, gain_wide, need_gain = dy.to(wide), gain.to(wide) + ctx.offset, ctx.needs_input_grad[1]
        # the fused backward of a layer norm whose mean is 0 takes the mean of dy * gain off as well: it is put back
        dx, dgain, _ = torch.ops.aten.native_layer_norm_backward(
            dy_wide.contiguous(), x.to(wide), (x.shape[-1],), torch.zeros_like(inverse), inverse, gain_wide, None,
            [True, need_gain, False],
        )  # fmt: skip
        mean = torch.mv(dy_wide.flatten(0, -2), gain_wide).view(inverse.shape).mul_(inverse / x.shape[-1])
        dx = dx.add_(mean) if dx.dtype == x.dtype else torch.add(dx, mean, out=torch.empty_like(x))
        return dx, _deliver(ctx.sink, dgain, gain.dtype) if need_gain else None, None, None


class _SplitRMSNorm(torch.autograd.Function):
    """The same where each rank has a part of the width: two numbers per token travel, one each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, offset: float, size: int, across: Across) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square()
        inverse = (across.total(squares) / (size * across.replicas) + eps).rsqrt_()
        ctx.sink, ctx.offset, ctx.size, ctx.across = sink_of(gain), offset, size, across
        ctx.save_for_backward(x, gain, inverse)
        return _scaled(x, inverse, gain, offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        dy_wide, x_wide = dy.to(inverse.dtype), x.to(inverse.dtype)
        inner = dy_wide * (gain.to(inverse.dtype) + ctx.offset)
        # replicas see a part of dy each: their sum is whole, and each of them takes its share of it off
        along = ctx.across.total((inner * x_wide).sum(-1, keepdim=True)) / (ctx.size * ctx.across.replicas)
        dx = (inner * inverse - x_wide * inverse**3 * along).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return dx, *(None,) * 5
        dgain = (dy_wide * x_wide * inverse).flatten(0, -2).sum(0)
        return dx, _deliver(ctx.sink, dgain, gain.dtype), *(None,) * 4


def _scaled(x: Tensor, inverse: Tensor, gain: Tensor, offset: float) -> Tensor:
    if not offset and x.dtype == gain.dtype:
        return torch.mul(x, inverse, out=torch.empty_like(x)).mul_(gain)
    return (x * inverse).mul_(gain.to(inverse.dtype) + offset).to(gain.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * (weight_D + offset). Socket `across`: filled where each rank has a part of D."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.size, self.eps, self.offset = size, eps, offset
        self.across: Across | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Shape of x kept."""
        if self.across is not None:
            return _SplitRMSNorm.apply(x, self.weight, self.eps, self.offset, self.size, self.across)
        return _RMSNorm.apply(x, self.weight, self.eps, self.offset)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = gain.to(x.dtype), bias.to(x.dtype)
        y, mean, inverse = torch.native_layer_norm(x, (x.shape[-1],), *wide, eps)
        ctx.sinks = sink_of(gain), sink_of(bias)
        ctx.save_for_backward(x, gain, bias, mean, inverse)
        return y.to(gain.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, bias, mean, inverse = ctx.saved_tensors
        dx, dgain, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.to(x.dtype).contiguous(), x, (x.shape[-1],), mean, inverse, gain.to(x.dtype), bias.to(x.dtype),
            [True, True, True],
        )  # fmt: skip
        g, b = ctx.sinks
        return dx, _deliver(g, dgain, gain.dtype), _deliver(b, dbias, bias.dtype), None


class LayerNorm(nn.Module):
    """(x - mean) / std * weight_D + bias_D."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shape of x kept."""
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)
