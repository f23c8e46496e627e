"""LLaMA 1, 2, 3, 3.1 and 3.2: configuration, presets and layout table. PURE; the modules are in `llama.py`.

Notable: rotary positions (half-split pairs), RMSNorm, SwiGLU, no biases (models built like it may have some),
grouped-query attention, untied output layer in the larger models, stretched frequencies from 3.1 on. Sources: Touvron
et al. 2023a (LLaMA), section 2.2; Touvron et al. 2023b (Llama 2), section 2.2; Llama team 2024 (Llama 3), table 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.nn.softmax_config import SoftmaxConfig
from isotron.core.options import option


@dataclass(frozen=True)
class LlamaConfig(SoftmaxConfig, LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "llama"

    attention_bias: bool = option(False, "biases on queries, keys, values and the attention's output")
    mlp_bias: bool = option(False, "biases on gate, up and down")

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table, d, n, f = super().layout(padded_vocab), self.hidden_size, self.head_size, self.ffn
        q, kv = Part(self.num_attention_heads, n), Part(self.kv_heads, n)
        qkv_rows = (self.num_attention_heads + 2 * self.kv_heads) * n
        attention = (
            Rule("layers.*.attention.qkv.bias", (qkv_rows,), Split(0, (q, kv, kv)), "heads", "zeros", decay=False),
            Rule("layers.*.attention.out.bias", (d,), init="zeros", decay=False),
        )
        mlp = (
            Rule("layers.*.mlp.gate_up.bias", (2 * f,), Split(0, (Part(f), Part(f))), init="zeros", decay=False),
            Rule("layers.*.mlp.down.bias", (d,), init="zeros", decay=False),
        )
        biases = (*(attention if self.attention_bias else ()), *(mlp if self.mlp_bias else ()))
        return replace(table, rules=(*biases, *self.sink_rules(self.num_attention_heads), *table.rules))


PRESETS: dict[str, LlamaConfig] = {
    "llama-tiny": LlamaConfig(4, 64, 4, 2, ffn_hidden_size=128),
    "llama-7b": LlamaConfig(32, 4096, 32, 32, 0, 11008, 32000, 2048, 1e-6),
    "llama2-7b": LlamaConfig(32, 4096, 32, 32, 0, 11008, 32000, 4096),
    "llama2-13b": LlamaConfig(40, 5120, 40, 40, 0, 13824, 32000, 4096),
    "llama2-70b": LlamaConfig(80, 8192, 64, 8, 0, 28672, 32000, 4096),
    "llama3-8b": LlamaConfig(32, 4096, 32, 8, 0, 14336, 128256, 8192, rope_theta=500000.0),
    "llama3-70b": LlamaConfig(80, 8192, 64, 8, 0, 28672, 128256, 8192, rope_theta=500000.0),
    "llama3-405b": LlamaConfig(126, 16384, 128, 8, 0, 53248, 128256, 8192, rope_theta=500000.0),
    "llama3.1-8b": LlamaConfig(
        32, 4096, 32, 8, 0, 14336, 128256, 131072, rope_theta=500000.0, rope_scaling="llama3",
        rope_factor=8.0, rope_original_positions=8192,
    ),
    "llama3.2-1b": LlamaConfig(
        16, 2048, 32, 8, 64, 8192, 128256, 131072, rope_theta=500000.0, rope_scaling="llama3",
        rope_factor=32.0, rope_original_positions=8192, tie_embeddings=True,
    ),
}  # fmt: skip
