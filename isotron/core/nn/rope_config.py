"""Rotary positions as options: how the frequencies are stretched for contexts longer than the ones trained on. PURE.

A family that rotates inherits these fields; `rope.py` turns them into angles. Sources: Chen et al. 2023 (linear),
Peng et al. 2023 (dynamic NTK, YaRN), Llama team 2024 (llama3), Ding et al. 2024 (LongRoPE), Black et al. 2022
(rotating a part of each head). A fixed NTK stretch is a larger rope_theta and needs no option.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.options import option

SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Fields of every family that rotates, beside its max_position_embeddings."""

    rope_theta: float = option(10000.0, "base of the rotary frequencies")
    rope_percent: float = option(1.0, "part of each head that is rotated")
    rope_scaling: str = option("none", "how rotary frequencies are stretched for long contexts", choices=SCALINGS)
    rope_factor: float = option(
        8.0, "how many times longer the context became; under longrope 0 means by the positions"
    )
    rope_original_positions: int = option(
        0, "longest sequence before the stretch; 0 means max_position_embeddings", unit="tokens"
    )
    rope_low_freq_factor: float = option(1.0, "llama3: waves longer than original positions / this are stretched fully")
    rope_high_freq_factor: float = option(4.0, "llama3: waves shorter than original positions / this stay as they are")
    rope_beta_fast: float = option(32.0, "yarn: frequencies with more turns than this stay as they are")
    rope_beta_slow: float = option(1.0, "yarn: frequencies with fewer turns than this are stretched fully")
    rope_truncate: bool = option(True, "yarn: the bounds between them are whole dimensions")
    rope_mscale: float = option(0.0, "yarn: numerator of the attention factor; 0 means 1")
    rope_mscale_all_dim: float = option(0.0, "yarn: denominator of the attention factor; 0 means none")
    rope_attention_factor: float = option(0.0, "yarn, longrope: factor of cos and sin; 0 means as the method says")
    rope_short_factor: tuple[float, ...] = option((), "longrope: divisors of the frequencies up to original positions")
    rope_long_factor: tuple[float, ...] = option((), "longrope: divisors of the frequencies beyond them")
