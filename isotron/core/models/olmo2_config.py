"""OLMo 2: configuration, presets and layout table. PURE; the modules are in `olmo2.py`.

Notable: LLaMA's shapes; norms of the results of attention and MLP in place of norms before them; one norm over all
heads of queries and one over all heads of keys before the rotation. Source: OLMo team 2025 (2 OLMo 2 Furious),
section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.llama_shapes import LlamaShapes


@dataclass(frozen=True)
class Olmo2Config(LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "olmo2"
    norms_after = True  # of attention and MLP, and none before

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table, n = super().layout(padded_vocab), self.head_size
        gains = (
            Rule(f"layers.*.attention.{x}_norm.weight", (heads * n,), Split(0, (Part(heads, n),)), "heads", init="ones",
                 decay=False)
            for x, heads in (("q", self.num_attention_heads), ("k", self.kv_heads))
        )  # fmt: skip
        return replace(table, rules=(*gains, *table.rules))


PRESETS: dict[str, Olmo2Config] = {
    "olmo2-tiny": Olmo2Config(4, 64, 4, 2, ffn_hidden_size=128),
    "olmo2-1b": Olmo2Config(16, 2048, 16, 16, 0, 8192, 100352, 4096, 1e-6, rope_theta=500000.0),
    "olmo2-7b": Olmo2Config(32, 4096, 32, 32, 0, 11008, 100352, 4096, 1e-6, rope_theta=500000.0),
    "olmo2-13b": Olmo2Config(40, 5120, 40, 40, 0, 13824, 100352, 4096, 1e-6, rope_theta=500000.0),
    "olmo2-32b": Olmo2Config(64, 5120, 40, 8, 0, 27648, 100352, 4096, 1e-6, rope_theta=500000.0),
}
