"""Gemma 3, the text model: configuration, presets and layout table. PURE; the modules are in `gemma3.py`.

Notable: Gemma 2 without its bounds, with norms on each head of queries and keys; five blocks with a window for each one
without, whose rotation has another base. Source: Gemma team 2025 (Gemma 3), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Rule, Table
from isotron.core.models.gemma2_config import Gemma2Config
from isotron.core.options import option


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "gemma3"

    window_attn_skip_freq: int = option(6, "every how-manieth block attends to all positions; 0 means none does")
    attn_logit_softcapping: float = option(0.0, "bound on attention scores; 0 means none")
    final_logit_softcapping: float = option(0.0, "bound on logits; 0 means none")
    rope_local_theta: float = option(10000.0, "base of the rotary frequencies in blocks with a window")

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table = super().layout(padded_vocab)
        # whole on every rank, but each rank normalises its own heads only; the gain is 1 + weight
        gains = (
            Rule(f"layers.*.attention.{x}_norm.weight", (self.head_size,), None, "heads", init="zeros", decay=False)
            for x in ("q", "k")
        )
        return replace(table, rules=(*gains, *table.rules))


PRESETS: dict[str, Gemma3Config] = {
    "gemma3-tiny": Gemma3Config(4, 64, 4, 2, 32, 128, sliding_window=64, window_attn_skip_freq=3, tie_embeddings=True),
    "gemma3-1b": Gemma3Config(
        26, 1152, 4, 1, 256, 6912, 262144, 32768, 1e-6, rope_theta=1000000.0, sliding_window=512,
        query_pre_attn_scalar=256, tie_embeddings=True,
    ),
    "gemma3-4b": Gemma3Config(
        34, 2560, 8, 4, 256, 10240, 262208, 131072, 1e-6, rope_theta=1000000.0, rope_scaling="linear", rope_factor=8.0,
        sliding_window=1024, query_pre_attn_scalar=256, tie_embeddings=True,
    ),
    "gemma3-12b": Gemma3Config(
        48, 3840, 16, 8, 256, 15360, 262208, 131072, 1e-6, rope_theta=1000000.0, rope_scaling="linear", rope_factor=8.0,
        sliding_window=1024, query_pre_attn_scalar=256, tie_embeddings=True,
    ),
    "gemma3-27b": Gemma3Config(
        62, 5376, 32, 16, 128, 21504, 262208, 131072, 1e-6, rope_theta=1000000.0, rope_scaling="linear",
        rope_factor=8.0, sliding_window=1024, query_pre_attn_scalar=168, tie_embeddings=True,
    ),
}  # fmt: skip
