"""Products of many rows with a weight W_OI and with its transpose, by the library that is faster here.

On a CPU torch gives float32 products to MKL, which takes the wide instructions of Intel's processors only; oneDNN takes
them from any. Weight gradients stay with torch: their operands are both transposed, which oneDNN puts in order first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from isotron.core.device import has_wide_instructions_unused
from isotron.core.nn import blocks

LEAST = 1 << 24  # multiplications: with fewer, the call itself takes longer than what it saves
HOST_ROWS = 256  # rows of a product with a whole vocabulary at a time: oneDNN does 1024 at half the rate


def times(x: Tensor, w_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x_...I W^T + bias: y_...O."""
    return _onednn(x, w_OI, bias_O) if _better(x, w_OI) else linear(x, w_OI, bias_O)


def back(dy: Tensor, w_OI: Tensor) -> Tensor:
    """dy_...O W: the gradient of x_...I."""
    return _onednn(dy, w_OI.t(), None) if _better(dy, w_OI) else torch.matmul(dy, w_OI)


def times_into(out_NO: Tensor, x_NI: Tensor, w_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x_NI W^T + bias, or with W^T for W the gradient of x, into a given tensor; for weights of very many elements."""
    better = _better(x_NI, w_OI)
    turns = better or (x_NI.device.type == "cpu" and x_NI.dtype is torch.bfloat16)
    step = HOST_ROWS if turns else max(1, len(x_NI))
    for start in blocks.starts(len(x_NI), step):
        x, out = x_NI[start : start + step], out_NO[start : start + step]
        if better:
            out.copy_(_onednn(x, w_OI, bias_O))
        elif bias_O is None:
            torch.mm(x, w_OI.t(), out=out)
        else:
            torch.addmm(bias_O, x, w_OI.t(), out=out)
    return out_NO


def _better(x: Tensor, w: Tensor) -> bool:
    outputs = w.numel() // max(1, x.shape[-1])
    large = x.numel() * outputs >= LEAST
    return large and has_wide_instructions_unused(x.device, x.dtype) and not torch.is_autocast_enabled("cpu")


def _onednn(x: Tensor, w_OI: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w_OI, bias, "none", [], "")  # type: ignore[no-any-return]
