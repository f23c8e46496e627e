"""Qwen3, dense: configuration, presets and layout table. PURE; the modules are in `qwen3.py`.

Notable: LLaMA's shapes; RMSNorm over each head of queries and keys before the rotation (one gain for all query heads,
one for all key heads); heads of 128 whatever the width; no biases. Source: Qwen team 2025 (Qwen3), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Rule, Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.options import option


@dataclass(frozen=True)
class Qwen3Config(LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "qwen3"

    sliding_window: int = option(0, "positions a query attends to, itself included; 0 means all", unit="tokens")
    first_window_layer: int = option(0, "layers below this one attend to all positions, whatever the window")

    def window(self, layer: int) -> int:
        """Positions that a query of this layer attends to; 0 means all."""
        return self.sliding_window if layer >= self.first_window_layer else 0

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table = super().layout(padded_vocab)
        # whole on every rank, but each rank normalises its own heads only
        gains = (
            Rule(f"layers.*.attention.{x}_norm.weight", (self.head_size,), None, "heads", init="ones", decay=False)
            for x in ("q", "k")
        )
        return replace(table, rules=(*gains, *table.rules))


PRESETS: dict[str, Qwen3Config] = {
    "qwen3-tiny": Qwen3Config(4, 64, 4, 2, 32, 128),
    "qwen3-0.6b": Qwen3Config(
        28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e-6, rope_theta=1000000.0, tie_embeddings=True
    ),
    "qwen3-8b": Qwen3Config(36, 4096, 32, 8, 128, 12288, 151936, 40960, 1e-6, rope_theta=1000000.0),
}
