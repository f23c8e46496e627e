"""GPT-NeoX and Pythia: configuration, presets and layout table. PURE; the modules are in `neox.py`.

Notable: attention and MLP side by side on one residual stream, each behind its own LayerNorm; a quarter of each head is
rotated; GELU, biases everywhere, untied output layer. Source: Black et al. 2022 (GPT-NeoX-20B), section 2.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.nn.rope_config import RotaryConfig
from isotron.core.options import option


@dataclass(frozen=True)
class NeoXConfig(RotaryConfig):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "neox"

    num_layers: int = option(12, "transformer blocks")
    hidden_size: int = option(768, "width of the residual stream")
    num_attention_heads: int = option(12, "query heads")
    ffn_hidden_size: int = option(0, "width of the MLP; 0 means 4 x hidden_size")
    vocab_size: int = option(0, "real vocabulary entries; 0 means what the tokenizer has")
    max_position_embeddings: int = option(0, "longest sequence; 0 means seq_length", unit="tokens")
    norm_epsilon: float = option(1e-5, "added to the variance in LayerNorm")
    activation: str = option(
        "gelu", "gelu is the exact erf form, gelu_tanh the approximation", choices=("gelu", "gelu_tanh")
    )
    parallel_residual: bool = option(True, "attention and MLP read the same residual stream; off: one after the other")
    tie_embeddings: bool = option(False, "the output layer uses the input embedding's weights")
    hidden_dropout: float = option(0.0, "dropout after the embedding, attention and MLP")
    attention_dropout: float = option(0.0, "dropout on attention probabilities")
    init_method_std: float = option(0.02, "standard deviation of initial weights")
    _: KW_ONLY
    rope_percent: float = option(0.25, "part of each head that is rotated")

    @property
    def ffn(self) -> int:
        """MLP width with its default filled in."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """N: width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """K: key/value heads, as many as query heads in this family."""
        return self.num_attention_heads

    @property
    def dropout(self) -> tuple[float, float]:
        """(hidden, attention) dropout probabilities."""
        return self.hidden_dropout, self.attention_dropout

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        d, f, v, std = self.hidden_size, self.ffn, self.vocab_size, self.init_method_std
        out_std = std / (2 * self.num_layers) ** 0.5
        heads, vocab = Part(self.num_attention_heads, self.head_size), Split(0, (Part(v, padded=padded_vocab),))
        block = (
            Rule("layers.*.attention.qkv.weight", (3 * d, d), Split(0, (heads,) * 3), std=std),
            Rule("layers.*.attention.qkv.bias", (3 * d,), Split(0, (heads,) * 3), init="zeros", decay=False),
            Rule("layers.*.attention.out.weight", (d, d), Split(1, (heads,)), std=out_std),
            Rule("layers.*.attention.out.bias", (d,), init="zeros", decay=False),
            Rule("layers.*.mlp.up.weight", (f, d), Split(0, (Part(f),)), std=std),
            Rule("layers.*.mlp.up.bias", (f,), Split(0, (Part(f),)), init="zeros", decay=False),
            Rule("layers.*.mlp.down.weight", (d, f), Split(1, (Part(f),)), std=out_std),
            Rule("layers.*.mlp.down.bias", (d,), init="zeros", decay=False),
        )
        norms = (
            Rule("*norm*.weight", (d,), init="ones", decay=False),
            Rule("*norm*.bias", (d,), init="zeros", decay=False),
        )
        ends = (Rule("embed.weight", (v, d), vocab, std=std), Rule("head.weight", (v, d), vocab, std=std))
        ties = (("head.weight", "embed.weight"),) if self.tie_embeddings else ()
        return Table((*ends, *block, *norms), ties)


PRESETS: dict[str, NeoXConfig] = {
    "neox-tiny": NeoXConfig(4, 64, 4),
    "pythia-160m": NeoXConfig(12, 768, 12, 3072, 50304, 2048),
    "neox-20b": NeoXConfig(44, 6144, 64, 24576, 50432, 2048, activation="gelu_tanh"),
}
