"""Gemma 2: configuration, presets and layout table. PURE; the modules are in `gemma2.py`.

Notable: LLaMA's shapes with GeGLU, heads of 256; norms before and after attention and MLP, whose gains are 1 + weight;
the embedding times sqrt(hidden size), tied to the head; bounds on scores and logits; every other block attends over a
window. Source: Gemma team 2024 (Gemma 2), section 2 and table 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Rule, Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.options import option


@dataclass(frozen=True)
class Gemma2Config(LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "gemma2"

    sliding_window: int = option(0, "positions a query attends to, itself included; 0 means all", unit="tokens")
    window_attn_skip_freq: int = option(2, "every how-manieth block attends to all positions; 0 means none does")
    query_pre_attn_scalar: int = option(0, "scores are divided by its square root; 0 means head_dim")
    attn_logit_softcapping: float = option(50.0, "bound on attention scores; 0 means none")
    final_logit_softcapping: float = option(30.0, "bound on logits; 0 means none")

    def is_local(self, layer: int) -> bool:
        """Whether the block attends over the window."""
        return not self.window_attn_skip_freq or (layer + 1) % self.window_attn_skip_freq != 0

    def window(self, layer: int) -> int:
        """Positions that a query of this layer attends to; 0 means all."""
        return self.sliding_window if self.is_local(layer) else 0

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return float(self.query_pre_attn_scalar or self.head_size) ** -0.5

    @property
    def embedding_scale(self) -> float:
        """Factor of embedded tokens."""
        return float(self.hidden_size**0.5)

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table = super().layout(padded_vocab)
        patterns = ("layers.*.attention_post_norm.weight", "layers.*.mlp_post_norm.weight", "*norm*.weight")
        norms = (Rule(p, (self.hidden_size,), init="zeros", decay=False) for p in patterns)  # gains are 1 + weight
        return replace(table, rules=(*(r for r in table.rules if r.pattern != patterns[-1]), *norms))


PRESETS: dict[str, Gemma2Config] = {
    "gemma2-tiny": Gemma2Config(4, 64, 4, 2, 32, 128, sliding_window=64, tie_embeddings=True),
    "gemma2-2b": Gemma2Config(
        26, 2304, 8, 4, 256, 9216, 256000, 8192, 1e-6, sliding_window=4096, query_pre_attn_scalar=256,
        tie_embeddings=True,
    ),
    "gemma2-9b": Gemma2Config(
        42, 3584, 16, 8, 256, 14336, 256000, 8192, 1e-6, sliding_window=4096, query_pre_attn_scalar=256,
        tie_embeddings=True,
    ),
    "gemma2-27b": Gemma2Config(
        46, 4608, 32, 16, 128, 36864, 256000, 8192, 1e-6, sliding_window=4096, query_pre_attn_scalar=144,
        tie_embeddings=True,
    ),
}  # fmt: skip
