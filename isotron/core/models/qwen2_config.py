"""Qwen2 and Qwen2.5: configuration, presets and layout table. PURE; the modules are in `qwen2.py`.

Notable: LLaMA's shapes with biases on queries, keys and values; tied embeddings in the small models; upper layers may
attend over a window. Sources: Qwen team 2024 (Qwen2), section 2; Qwen team 2025 (Qwen2.5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.options import option


@dataclass(frozen=True)
class Qwen2Config(LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "qwen2"

    sliding_window: int = option(0, "positions a query attends to, itself included; 0 means all", unit="tokens")
    first_window_layer: int = option(0, "layers below this one attend to all positions, whatever the window")

    def window(self, layer: int) -> int:
        """Positions that a query of this layer attends to; 0 means all."""
        return self.sliding_window if layer >= self.first_window_layer else 0

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table, n = super().layout(padded_vocab), self.head_size
        q, kv = Part(self.num_attention_heads, n), Part(self.kv_heads, n)
        rows = (self.num_attention_heads + 2 * self.kv_heads) * n
        bias = Rule("layers.*.attention.qkv.bias", (rows,), Split(0, (q, kv, kv)), "heads", init="zeros", decay=False)
        return replace(table, rules=(bias, *table.rules))


PRESETS: dict[str, Qwen2Config] = {
    "qwen2-tiny": Qwen2Config(4, 64, 4, 2, ffn_hidden_size=128),
    "qwen2.5-0.5b": Qwen2Config(
        24, 896, 14, 2, 0, 4864, 151936, 32768, 1e-6, rope_theta=1000000.0, tie_embeddings=True
    ),
    "qwen2.5-7b": Qwen2Config(28, 3584, 28, 4, 0, 18944, 152064, 131072, 1e-6, rope_theta=1000000.0),
}
