"""Rotary positions on half-split pairs: (x_i, x_{i+N/2}) turned by position * theta^(-2i/N).

Legend: B batch, S sequence, H heads, N head size. Angles in float32 (float64 for float64 models).
Source: Su et al. 2021 (RoFormer), section 3.4; half-split pairing as in GPT-NeoX and the Hugging Face LLaMA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]


def angles(positions_BS: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Angles:
    """(cos, sin), each [B, S, 1, N/2] of `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_size, 2, dtype=wide, device=positions_BS.device) / head_size
    turn = positions_BS[..., None, None].to(wide) * (1.0 / theta**steps)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, sin, -1.0), None, None


def rotate(x_BSHN: Tensor, rope: Angles) -> Tensor:
    """Turn every head of x by the angles of its position."""
    return _Rotate.apply(x_BSHN, *rope)
