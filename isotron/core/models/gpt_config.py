"""GPT-2 and GPT-3: configuration, presets and layout table. PURE; the modules are in `gpt.py`.

Notable: learned positions, LayerNorm with bias, GELU, a bias on every linear layer, tied input and output embeddings,
dropout. Sources: Radford et al. 2019 (GPT-2), section 2.3; Brown et al. 2020 (GPT-3), table 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.options import option


@dataclass(frozen=True)
class GPTConfig:
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "gpt"

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
    tie_embeddings: bool = option(True, "the output layer uses the input embedding's weights")
    hidden_dropout: float = option(0.1, "dropout after the embedding, attention and MLP")
    attention_dropout: float = option(0.1, "dropout on attention probabilities")
    init_method_std: float = option(0.02, "standard deviation of initial weights")

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

    @property
    def branch_std(self) -> float:
        """Standard deviation of what ends attention and MLP, whose results add up over the blocks."""
        return float(self.init_method_std / (2 * self.num_layers) ** 0.5)

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        d, f, v, std, out_std = self.hidden_size, self.ffn, self.vocab_size, self.init_method_std, self.branch_std
        heads = Part(self.num_attention_heads, self.head_size)
        vocab = Split(0, (Part(v, padded=padded_vocab),))
        embedding = Rule("embed.weight", (v, d), vocab, std=std)
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
        positions = Rule("positions.weight", (self.max_position_embeddings, d), std=std)
        head = Rule("head.weight", (v, d), vocab, std=std)
        ties = (("head.weight", "embed.weight"),) if self.tie_embeddings else ()
        return Table((embedding, positions, *block, *norms, head), ties)


PRESETS: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(2, 64, 4, hidden_dropout=0.0, attention_dropout=0.0),
    "gpt2": GPTConfig(12, 768, 12, vocab_size=50257, max_position_embeddings=1024, activation="gelu_tanh"),
    "gpt2-medium": GPTConfig(24, 1024, 16, vocab_size=50257, max_position_embeddings=1024, activation="gelu_tanh"),
    "gpt2-large": GPTConfig(36, 1280, 20, vocab_size=50257, max_position_embeddings=1024, activation="gelu_tanh"),
    "gpt2-xl": GPTConfig(48, 1600, 25, vocab_size=50257, max_position_embeddings=1024, activation="gelu_tanh"),
    "megatron-8.3b": GPTConfig(72, 3072, 24, vocab_size=51200, max_position_embeddings=1024),
    "mt-nlg-530b": GPTConfig(105, 20480, 128, vocab_size=51200, max_position_embeddings=2048),
    "gpt-1t": GPTConfig(128, 25600, 160, vocab_size=51200, max_position_embeddings=2048),
    "gpt-175b": GPTConfig(96, 12288, 96, vocab_size=50257, max_position_embeddings=2048, activation="gelu_tanh"),
}
