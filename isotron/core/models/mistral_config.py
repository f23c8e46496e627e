"""Mistral 7B and its kin: configuration, presets and layout table. PURE; the modules are in `mistral.py`.

Notable: LLaMA's shapes; each query attends to the last `sliding_window` positions only (in 7B v0.1; later ones have no
window). Source: Jiang et al. 2023 (Mistral 7B), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.options import option


@dataclass(frozen=True)
class MistralConfig(LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "mistral"

    sliding_window: int = option(0, "positions a query attends to, itself included; 0 means all", unit="tokens")


PRESETS: dict[str, MistralConfig] = {
    "mistral-tiny": MistralConfig(4, 64, 4, 2, ffn_hidden_size=128, sliding_window=64),
    "mistral-7b": MistralConfig(32, 4096, 32, 8, 128, 14336, 32000, 32768, sliding_window=4096),
}
