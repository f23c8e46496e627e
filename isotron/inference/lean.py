"""The plain layers without what only training needs: no autograd operation, nothing kept for a backward.

Inside `lean`, layers compute the same with fewer and fused calls; a layer type that is not in the tables computes as
always. A pass of one token spends its time in calls, not in arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, silu

from isotron.core.nn.dropout import Dropout
from isotron.core.nn.linear import Linear
from isotron.core.nn.loss import Head
from isotron.core.nn.mlp import GatedMLP, swiglu
from isotron.core.nn.norm import LayerNorm, RMSNorm
from isotron.inference.packed import Product, worthwhile

Forward = Callable[..., Tensor]  # made of a layer, and of whether copies of weights may be used


def _linear(layer: Linear, packed: bool) -> Forward:
    multiply, bias, enter, leave = Product(layer.weight, packed), layer.bias, layer.enter, layer.leave
    if enter is None and leave is None:
        return lambda x, pre=None: multiply(x if pre is None else pre(x), bias)

    def forward(x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        a = x if pre is None else pre(x)
        full = a if enter is None else enter.forward(a).wait()
        if leave is None:
            return multiply(full, bias)
        y = leave.forward(multiply(full)).wait()
        return y if bias is None else y.add_(bias)

    return forward


def _rms(layer: RMSNorm, packed: bool) -> Forward | None:
    weight, eps, offset = layer.weight, layer.eps, layer.offset
    if weight.dtype in (torch.bfloat16, torch.float16):  # there the order of roundings is part of the function
        return None
    if layer.across is not None:
        return None
    shape = (weight.shape[0],)
    if offset:
        return lambda x: rms_norm(x, shape, weight + offset, eps)
    return lambda x: rms_norm(x, shape, weight, eps)


def _layer_norm(layer: LayerNorm, packed: bool) -> Forward | None:
    weight, bias, eps = layer.weight, layer.bias, layer.eps
    shape = (weight.shape[0],)
    return lambda x: layer_norm(x, shape, weight, bias, eps)


def _gated(layer: GatedMLP, packed: bool) -> Forward | None:
    up, down = layer.gate_up, layer.down
    if layer.gated is not swiglu:
        return None

    def forward(x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        gate, value = up(x, pre).chunk(2, -1)
        return down(silu(gate).mul_(value))

    return forward


def _nothing(layer: Dropout, packed: bool) -> Forward | None:
    return lambda x, ids: x


def _logits(layer: Head, packed: bool) -> Forward:
    weight, bias = layer.held()
    multiply, enter, softcap = Product(weight, packed), layer.enter, layer.softcap

    def logits(x: Tensor) -> Tensor:
        y = multiply(x if enter is None else enter.forward(x).wait(), bias)
        return torch.tanh(y / softcap) * softcap if softcap else y

    return logits


TABLE: dict[type, Callable[[Any, bool], Forward | None]] = {
    Linear: _linear,
    Head: _logits,
    RMSNorm: _rms,
    LayerNorm: _layer_norm,
    GatedMLP: _gated,
    Dropout: _nothing,
}


@contextmanager
def lean(module: nn.Module, stays: bool = True) -> Iterator[None]:
    """Inside, the layers of `module` compute without a backward; afterwards they are as before.

    `stays`: the weights lie where they lie and do not change inside, so that copies of them can be used.
    """
    changed: list[tuple[nn.Module, str]] = []
    layers: list[Any] = [layer for layer in module.modules() if type(layer) in TABLE]
    packed = stays and worthwhile(layer.weight for layer in layers if isinstance(layer, (Linear, Head)))
    try:
        for layer in layers:
            name, found = "logits" if isinstance(layer, Head) else "forward", TABLE[type(layer)](layer, packed)
            if found is not None:
                setattr(layer, name, found)
                changed.append((layer, name))
        yield
    finally:
        for layer, name in changed:
            delattr(layer, name)
