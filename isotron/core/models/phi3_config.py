"""Phi-3 and Phi-4 (dense): configuration, presets and layout table. PURE; the modules are in `phi3.py`.

Notable: LLaMA's shapes; attention over a window in the short-context models, LongRoPE in the long-context ones, and in
Phi-4-mini a part of each head that is not rotated. Source: Abdin et al. 2024 (Phi-3), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.options import option


@dataclass(frozen=True)
class Phi3Config(LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "phi3"

    sliding_window: int = option(0, "positions a query attends to, itself included; 0 means all", unit="tokens")


PRESETS: dict[str, Phi3Config] = {
    "phi3-tiny": Phi3Config(4, 64, 4, 2, ffn_hidden_size=128),
    "phi3-mini-4k": Phi3Config(32, 3072, 32, 32, 0, 8192, 32064, 4096, sliding_window=2047),
}
