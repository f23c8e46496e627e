"""The linear layer as one autograd operation with policies.

Shapes: x_...I input features, y_...O output features, W_OI.

`linear(x, W, bias, pre, enter, leave)` computes `leave(enter(pre(x)) @ W^T) + bias`:

- `pre` is what comes just before the layer (a norm, an activation). Given here, its result is not kept: the backward
  computes it again from x.
- `enter` and `leave` are the sockets that tensor parallelism fills. The local input is kept and gathered again in the
  backward; the communication of the input gradient runs while the weight gradient is computed.
- The weight gradient goes to the parameter's `GradSink` when it has one (now, or on a list for a later pass), else
  through autograd. The bias is added after `leave`, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.autograd import backward_from
from isotron.core.device import has_wide_products
from isotron.core.nn import blocks, products

ADD_ELEMENTS = 1 << 18  # of a gradient that is widened and added, at a time


class Wait(Protocol):
    """A result that may still be under way."""

    def wait(self) -> Tensor:
        """The result."""
        ...


class Socket(Protocol):
    """What happens to an activation on its way into or out of a layer; `backward` is the gradient of `forward`."""

    def forward(self, x: Tensor) -> Wait:
        """Start the forward."""
        ...

    def backward(self, dx: Tensor) -> Wait:
        """Start the gradient."""
        ...


class GradSink:
    """Where the gradient of one parameter accumulates: a view of a flat buffer, usually wider than the parameter.

    The buffer is given, or opened by `provide` at the first write and let go by `close`.
    `fresh` means that the buffer holds nothing yet, so the first write replaces instead of adding. `later`, when a
    list, takes the weight-gradient work instead of doing it; `defers` says before a forward that it will be one in the
    backward. `on_write` is called after each contribution when set; `times` contributions make one backward.
    """

    def __init__(self, buffer: Tensor | None = None, provide: Callable[[], Tensor] | None = None) -> None:
        self._buffer, self._provide = buffer, provide
        self.fresh = True
        self.later: list[Callable[[], None]] | None = None
        self.defers = False
        self.on_write: Callable[[GradSink], None] | None = None
        self.times = 1

    @property
    def buffer(self) -> Tensor:
        """The sum so far, of the parameter's shape."""
        if self._buffer is None:
            if self._provide is None:
                raise RuntimeError("a gradient has neither a buffer nor a way to open one")
            self._buffer = self._provide()
        return self._buffer

    def close(self) -> None:
        """The sum has been taken out of the buffer, which may be freed; the next write opens another."""
        self._buffer, self.fresh = None, True

    def add(self, grad: Tensor) -> None:
        """Accumulate a gradient of the parameter's shape."""
        if self.fresh:
            self.buffer.copy_(grad)
        else:
            add_narrow(self.buffer, grad)
        self.fresh = False
        self.written()

    def add_outer(self, dy: Tensor, x: Tensor) -> None:
        """Accumulate dy_NO^T x_NI."""
        if self.later is not None:
            self.later.append(lambda: self._outer(dy, x))
        else:
            self._outer(dy, x)

    def add_rows(self, index: Tensor, dy: Tensor) -> None:
        """Accumulate dy_NI at rows index_N; a row that comes often is summed before it goes into 16 bits."""
        self.clear_if_fresh()
        if self.buffer.dtype.itemsize < 4:
            index, places = index.unique(return_inverse=True)
            dy = dy.new_zeros(len(index), *dy.shape[1:], dtype=torch.float32).index_add_(0, places, dy.float())
        self.buffer.index_add_(0, index, dy.to(self.buffer.dtype))
        self.written()

    def clear_if_fresh(self) -> None:
        """Make the buffer readable when nothing has been written."""
        if self.fresh:
            self.buffer.zero_()
            self.fresh = False

    def _outer(self, dy: Tensor, x: Tensor) -> None:
        buffer = self.buffer
        if dy.dtype == buffer.dtype:
            torch.addmm(buffer, dy.t(), x, beta=0 if self.fresh else 1, out=buffer)
            self.fresh = False
            self.written()
        elif has_wide_products(dy.device):
            self.add(torch.mm(dy.t(), x, out_dtype=self.buffer.dtype))
        else:  # rounds once per microbatch; products in float32 take three times as long on a CPU
            self.add(torch.mm(dy.t(), x))

    def written(self) -> None:
        """Note that one contribution is complete."""
        if self.on_write is not None:
            self.on_write(self)


def add_narrow(total: Tensor, part: Tensor) -> None:
    """total += part of the same shape. On a CPU a narrower part is widened block by block: `add_` alone makes a wide
    copy of all of it, in memory that is not in the cache.
    """
    narrower = part.dtype.itemsize < total.dtype.itemsize
    if not narrower or total.device.type != "cpu" or total.numel() <= ADD_ELEMENTS:
        total.add_(part)
        return
    sums, parts = total.view(-1), part.reshape(-1)
    block = torch.empty(ADD_ELEMENTS, dtype=total.dtype)
    for start in blocks.starts(len(sums), ADD_ELEMENTS):
        piece = parts[start : start + ADD_ELEMENTS]
        sums[start : start + ADD_ELEMENTS].add_(block[: len(piece)].copy_(piece))


def sink_of(p: Tensor) -> GradSink | None:
    """The sink of a parameter, if it has one."""
    return getattr(p, "grad_sink", None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, pre: Any, enter: Any, leave: Any, unasked: Any = None
    ) -> Tensor:
        ctx.pre, ctx.enter, ctx.leave, ctx.sink = pre, enter, leave, sink_of(w)
        ctx.bias_sink = None if bias is None else sink_of(bias)
        ctx.save_for_backward(x, w)
        if unasked is not None:
            return x.new_empty(unasked)
        a = x if pre is None else pre(x)
        full = a if enter is None else enter.forward(a).wait()
        if leave is None:
            return products.times(full, w, bias)
        y = leave.forward(products.times(full, w)).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        db = _bias_grad(dy, ctx.bias_sink) if need_b else None
        a, leaf = x, None
        if ctx.pre is not None:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                a = ctx.pre(leaf)
        dy_coming = None if ctx.leave is None else ctx.leave.backward(dy)
        full_coming = None if ctx.enter is None or not need_w else ctx.enter.forward(a.detach())
        dy = dy if dy_coming is None else dy_coming.wait()
        dx = dw = dx_coming = None
        if need_x:
            dx = products.back(dy, w)
            dx_coming = None if ctx.enter is None else ctx.enter.backward(dx)
        if need_w:
            full = a.detach() if full_coming is None else full_coming.wait()
            dw = _weight_grad(dy, full, ctx.sink)
        dx = dx if dx_coming is None else dx_coming.wait()
        if leaf is not None and dx is not None:
            backward_from([a], [dx])
            dx = leaf.grad
        return dx, dw, db, *(None,) * 4


def _bias_grad(dy: Tensor, sink: GradSink | None) -> Tensor | None:
    wide = torch.promote_types(dy.dtype, torch.float32)
    db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=wide)
    if sink is None:
        return db.to(dy.dtype)
    sink.add(db)
    return None


def _weight_grad(dy: Tensor, x: Tensor, sink: GradSink | None) -> Tensor | None:
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if sink is None:
        return torch.mm(dy.t(), x)
    sink.add_outer(dy, x)
    return None


class Linear(nn.Module):
    """y = x W^T + b with W_OI. Sockets `enter` and `leave` are empty on one process.

    `unasked`: in a second forward, the shape of a result that nothing reads; it is not computed.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.enter: Socket | None = None
        self.leave: Socket | None = None
        self.unasked: torch.Size | None = None

    def forward(self, x: Tensor, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first and computed again in the backward."""
        if pre is not None and not x.requires_grad:  # the backward would stop at x, before the parameters of pre
            x, pre = pre(x), None
        return _Linear.apply(x, self.weight, self.bias, pre, self.enter, self.leave, self.unasked)
