"""The plain layers without what only training needs: no autograd operation, nothing kept for a backward.

Inside `lean`, layers compute the same with fewer and fused calls; a layer type that is not in the table, or that a
parallel layout has given sockets, computes as always. A pass of one token spends its time in calls, not in arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm, silu

from isotron.core.nn.dropout import Dropout
from isotron.core.nn.linear import Linear
from isotron.core.nn.mlp import GatedMLP, swiglu
from isotron.core.nn.norm import LayerNorm, RMSNorm

Forward = Callable[..., Tensor]


def _linear(layer: Linear) -> Forward | None:
    if layer.enter is not None or layer.leave is not None:
        return None
    weight, bias = layer.weight, layer.bias
    return lambda x, pre=None: linear(x if pre is None else pre(x), weight, bias)


def _rms(layer: RMSNorm) -> Forward | None:
    weight, eps, offset = layer.weight, layer.eps, layer.offset
    if weight.dtype in (torch.bfloat16, torch.float16):  # there the order of roundings is part of the function
        return None
    if layer.across is not None:
        return None
    shape = (weight.shape[0],)
    if offset:
        return lambda x: rms_norm(x, shape, weight + offset, eps)
    return lambda x: rms_norm(x, shape, weight, eps)


def _layer_norm(layer: LayerNorm) -> Forward | None:
    weight, bias, eps = layer.weight, layer.bias, layer.eps
    shape = (weight.shape[0],)
    return lambda x: layer_norm(x, shape, weight, bias, eps)


def _gated(layer: GatedMLP) -> Forward | None:
    up, down = layer.gate_up, layer.down
    if layer.gated is not swiglu:
        return None

    def forward(x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        gate, value = up(x, pre).chunk(2, -1)
        return down(silu(gate).mul_(value))

    return forward


def _nothing(layer: Dropout) -> Forward | None:
    return lambda x, ids: x


TABLE: dict[type, Callable[[Any], Forward | None]] = {
    Linear: _linear,
    RMSNorm: _rms,
    LayerNorm: _layer_norm,
    GatedMLP: _gated,
    Dropout: _nothing,
}


@contextmanager
def lean(module: nn.Module) -> Iterator[None]:
    """Inside, the layers of `module` compute without a backward; afterwards they are as before."""
    changed: list[nn.Module] = []
    try:
        for layer in module.modules():
            make = TABLE.get(type(layer))
            forward = None if make is None else make(layer)
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward
