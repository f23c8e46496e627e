"""What LLaMA and the families built like it share: sizes and layout table. PURE.

Notable: rotary positions, RMSNorm, a gated MLP, grouped-query attention; no biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.nn.rope_config import RotaryConfig
from isotron.core.options import option


@dataclass(frozen=True)
class LlamaShapes(RotaryConfig):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family: ClassVar[str]

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
