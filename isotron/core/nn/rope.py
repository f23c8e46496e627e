"""Rotary positions on half-split pairs: (x_i, x_{i+N/2}) turned by position * theta^(-2i/N), or stretched frequencies.

Legend: B batch, S sequence, H heads, N head size. Angles in float32 (float64 for float64 models).
Source: Su et al. 2021 (RoFormer), section 3.4; half-split pairing as in GPT-NeoX and the Hugging Face LLaMA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isotron.core.nn.rope_config import RotaryConfig

Angles = tuple[Tensor, Tensor]


def angles(positions_BS: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Angles:
    """(cos, sin), each [B, S, 1, N/2] of `dtype`, without any stretch."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_size, 2, dtype=wide, device=positions_BS.device) / head_size
    return _angles(positions_BS, 1.0 / theta**steps, 1.0, dtype)


def stretched_angles(
    positions_BS: Tensor,
    cfg: RotaryConfig,
    head_size: int,
    longest: int,
    dtype: torch.dtype,
    present: Callable[[], int] | None = None,
) -> Angles:
    """(cos, sin), each [B, S, 1, R/2] for the R rotated elements of a head, as `cfg` stretches them.

    `longest`: the model's longest sequence. `present`: gives the length of the present one where the positions are a
    part of it.
    """
    wide, device = torch.promote_types(dtype, torch.float32), positions_BS.device
    size = int(head_size * cfg.rope_percent)
    steps = torch.arange(0, size, 2, dtype=wide, device=device) / size
    # only these two look at the length of the present sequence
    looked_at = cfg.rope_scaling in ("dynamic", "longrope")
    length = 0 if not looked_at else int(positions_BS.max()) + 1 if present is None else present()
    frequencies = STRETCHES[cfg.rope_scaling](cfg, steps, longest, length)
    return _angles(positions_BS, frequencies, attention_factor(cfg, longest), dtype)


def _angles(positions_BS: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Angles:
    turn = positions_BS[..., None, None].to(frequencies.dtype) * frequencies
    return (turn.cos() * factor).to(dtype), (turn.sin() * factor).to(dtype)


def original_positions(cfg: RotaryConfig, longest: int) -> int:
    """The longest sequence before the stretch."""
    return cfg.rope_original_positions or longest


def longrope_factor(cfg: RotaryConfig, longest: int) -> float:
    """How many times longer the context became."""
    return cfg.rope_factor or longest / original_positions(cfg, longest)


def attention_factor(cfg: RotaryConfig, longest: int) -> float:
    """What cos and sin are multiplied with, so that attention stays as sharp as over the original positions."""
    if cfg.rope_scaling not in ("yarn", "longrope"):
        return 1.0
    if cfg.rope_attention_factor:
        return cfg.rope_attention_factor
    if cfg.rope_scaling == "longrope":
        factor = longrope_factor(cfg, longest)
        return math.sqrt(1 + math.log(factor) / math.log(original_positions(cfg, longest))) if factor > 1 else 1.0

    def scale(m: float) -> float:
        return 0.1 * m * math.log(cfg.rope_factor) + 1.0 if cfg.rope_factor > 1 else 1.0

    if cfg.rope_mscale and cfg.rope_mscale_all_dim:
        return scale(cfg.rope_mscale) / scale(cfg.rope_mscale_all_dim)
    return scale(1.0)


def _plain(cfg: RotaryConfig, steps: Tensor, longest: int, length: int) -> Tensor:
    return 1.0 / cfg.rope_theta**steps


def _linear(cfg: RotaryConfig, steps: Tensor, longest: int, length: int) -> Tensor:
    return _plain(cfg, steps, longest, length) / cfg.rope_factor


def _dynamic(cfg: RotaryConfig, steps: Tensor, longest: int, length: int) -> Tensor:
    size = 2 * len(steps)
    grown = cfg.rope_factor * max(length, longest) / longest - (cfg.rope_factor - 1)
    return 1.0 / (cfg.rope_theta * grown ** (size / (size - 2))) ** steps


def _llama3(cfg: RotaryConfig, steps: Tensor, longest: int, length: int) -> Tensor:
    plain, first = _plain(cfg, steps, longest, length), original_positions(cfg, longest)
    turns = first * plain / (2 * math.pi)  # over the original positions
    low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / cfg.rope_factor * (1 - kept) + plain * kept


def _yarn(cfg: RotaryConfig, steps: Tensor, longest: int, length: int) -> Tensor:
    first, size = original_positions(cfg, longest), 2 * len(steps)

    def dimension(turns: float) -> float:
        return size * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = dimension(cfg.rope_beta_fast), dimension(cfg.rope_beta_slow)
    if cfg.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    place = torch.arange(size // 2, dtype=steps.dtype, device=steps.device)
    stretch = ((place - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    plain = _plain(cfg, steps, longest, length)
    return plain / cfg.rope_factor * stretch + plain * (1 - stretch)


def _longrope(cfg: RotaryConfig, steps: Tensor, longest: int, length: int) -> Tensor:
    factors = cfg.rope_long_factor if length > original_positions(cfg, longest) else cfg.rope_short_factor
    return 1.0 / (torch.tensor(factors, dtype=steps.dtype, device=steps.device) * cfg.rope_theta**steps)


STRETCHES: dict[str, Callable[[RotaryConfig, Tensor, int, int], Tensor]] = {
    "none": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


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
    """Turn every head of x by the angles of its position; elements beyond the angles stay as they are."""
    turned = 2 * rope[0].shape[-1]
    if turned == x_BSHN.shape[-1]:
        return _rotated(x_BSHN, rope)
    return torch.cat((_rotated(x_BSHN[..., :turned], rope), x_BSHN[..., turned:]), -1)


def _rotated(x: Tensor, rope: Angles) -> Tensor:
    if torch.is_inference_mode_enabled():  # nothing is kept, and the operation itself is a good part of the time
        return _turn(x, *rope, 1.0)
    return _Rotate.apply(x, *rope)
