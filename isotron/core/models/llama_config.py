"""LLaMA 1, 2, 3, 3.1 and 3.2: configuration, presets and layout table. PURE; the modules are in `llama.py`.

Notable: rotary positions (half-split pairs), RMSNorm, SwiGLU, no biases, grouped-query attention, untied output layer
in the larger models, stretched frequencies from 3.1 on. Sources: Touvron et al. 2023a (LLaMA), section 2.2; Touvron
et al. 2023b (Llama 2), section 2.2; Llama team 2024 (Llama 3), table 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.nn.rope_config import RotaryConfig
from isotron.core.options import option


@dataclass(frozen=True)
class LlamaConfig(RotaryConfig):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "llama"

    num_layers: int = option(12, "transformer blocks")
    hidden_size: int = option(768, "width of the residual stream")
    num_attention_heads: int = option(12, "query heads")
    num_key_value_heads: int = option(0, "key/value heads (groups); 0 means num_attention_heads")
    head_dim: int = option(0, "width of one head; 0 means hidden_size / num_attention_heads")
    ffn_hidden_size: int = option(0, "width of the MLP; 0 means 8/3 x hidden_size in whole multiples of 64")
    vocab_size: int = option(0, "real vocabulary entries; 0 means what the tokenizer has")
    max_position_embeddings: int = option(0, "longest sequence; 0 means seq_length", unit="tokens")
    norm_epsilon: float = option(1e-5, "added to the mean square in RMSNorm")
    tie_embeddings: bool = option(False, "the output layer uses the input embedding's weights")
    hidden_dropout: float = option(0.0, "dropout after the embedding, attention and MLP")
    attention_dropout: float = option(0.0, "dropout on attention probabilities")
    init_method_std: float = option(0.02, "standard deviation of initial weights")

    @property
    def ffn(self) -> int:
        """MLP width with its default filled in."""
        return self.ffn_hidden_size or max(64, int(8 * self.hidden_size / 3 / 64) * 64)

    @property
    def head_size(self) -> int:
        """N: width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """K: key/value heads with the default filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def dropout(self) -> tuple[float, float]:
        """(hidden, attention) dropout probabilities."""
        return self.hidden_dropout, self.attention_dropout

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        d, f, v, n, std = self.hidden_size, self.ffn, self.vocab_size, self.head_size, self.init_method_std
        out_std = std / (2 * self.num_layers) ** 0.5
        q, kv = Part(self.num_attention_heads, n), Part(self.kv_heads, n)
        vocab = Split(0, (Part(v, padded=padded_vocab),))
        qkv_rows = (self.num_attention_heads + 2 * self.kv_heads) * n
        block = (
            Rule("layers.*.attention.qkv.weight", (qkv_rows, d), Split(0, (q, kv, kv)), "heads", std=std),
            Rule("layers.*.attention.out.weight", (d, self.num_attention_heads * n), Split(1, (q,)), std=out_std),
            Rule("layers.*.mlp.gate_up.weight", (2 * f, d), Split(0, (Part(f), Part(f))), std=std),
            Rule("layers.*.mlp.down.weight", (d, f), Split(1, (Part(f),)), std=out_std),
        )
        norms = (Rule("*norm*.weight", (d,), init="ones", decay=False),)
        ends = (Rule("embed.weight", (v, d), vocab, std=std), Rule("head.weight", (v, d), vocab, std=std))
        ties = (("head.weight", "embed.weight"),) if self.tie_embeddings else ()
        return Table((*ends, *block, *norms), ties)


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
