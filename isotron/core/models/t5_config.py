"""T5 and T5 v1.1: configuration, presets and layout table. PURE; the modules are in `t5.py`.

Notable: an encoder whose tokens see each other and a decoder that looks at it; a relative position bias per head that
all blocks of either share, none in cross-attention; scores that are not scaled, which the initial values make up for;
RMSNorm before everything; no biases; a tied output layer behind a factor of 1/sqrt(hidden size). v1.1 has a gated GELU
and an output layer of its own, without the factor. Blocks are numbered through, the encoder's first. Sources: Raffel et
al. 2020 (T5), section 2.1 and 3.7; Shazeer 2020 (gated MLPs); Shazeer & Stern 2018 and the published code for the
initial values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isotron.core.errors import Problem, Refused
from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.options import option


@dataclass(frozen=True)
class T5Config:
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "t5"
    two_streams = True  # an encoder reads one, a decoder another

    encoder_num_layers: int = option(12, "blocks of the encoder")
    decoder_num_layers: int = option(0, "blocks of the decoder; 0 means encoder_num_layers")
    hidden_size: int = option(768, "width of the residual stream")
    num_attention_heads: int = option(12, "heads")
    head_dim: int = option(0, "width of one head; 0 means hidden_size / num_attention_heads")
    ffn_hidden_size: int = option(0, "width of the MLP; 0 means 4 x hidden_size")
    vocab_size: int = option(0, "real vocabulary entries; 0 means what the tokenizer has")
    max_position_embeddings: int = option(0, "longest sequence; 0 means seq_length", unit="tokens")
    decoder_seq_length: int = option(
        0, "tokens of the decoder's rows; 0 means what the masked spans of seq_length come to", unit="tokens"
    )
    decoder_start_token_id: int = option(0, "id that the decoder reads first")
    norm_epsilon: float = option(1e-6, "added to the mean square in RMSNorm")
    feed_forward_proj: str = option("relu", "MLP: relu, or gated-gelu (v1.1)", choices=("relu", "gated-gelu"))
    tie_embeddings: bool = option(True, "the output layer uses the embedding's weights, behind 1/sqrt(hidden_size)")
    hidden_dropout: float = option(0.1, "dropout after embeddings, attention and MLP")
    attention_dropout: float = option(0.1, "dropout on attention probabilities")
    relative_attention_num_buckets: int = option(32, "buckets of distances that have a bias")
    relative_attention_max_distance: int = option(128, "distances from here on share a bucket", unit="tokens")
    initializer_factor: float = option(1.0, "factor of the standard deviations of all initial weights")

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder with the default filled in."""
        return self.decoder_num_layers or self.encoder_num_layers

    @property
    def num_layers(self) -> int:
        """Blocks in all: the encoder's, then the decoder's."""
        return self.encoder_num_layers + self.decoder_layers

    @property
    def ffn(self) -> int:
        """MLP width with its default filled in."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """N: width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads, as many as query heads in this family."""
        return self.num_attention_heads

    @property
    def dropout(self) -> tuple[float, float]:
        """(hidden, attention) dropout probabilities."""
        return self.hidden_dropout, self.attention_dropout

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.feed_forward_proj == "gated-gelu"

    @property
    def output_factor(self) -> float:
        """Of what the output layer takes."""
        return float(self.hidden_size**-0.5) if self.tie_embeddings else 1.0

    def block_tokens(self, source: int) -> int:
        """Tokens that pass the blocks, over all of them, of a pair with `source` tokens for the encoder."""
        return source * self.encoder_num_layers + (self.decoder_seq_length or source) * self.decoder_layers

    def multiplications(self, source: int, causal: bool = False) -> tuple[list[tuple[float, float]], float]:
        """Multiply-adds of a pair with `source` tokens for the encoder: of each block its matrices and its scores, and
        of the output layer. `causal`: the decoder's keys are counted as it sees them, not as the full square.
        """
        d, inner, target = self.hidden_size, self.num_attention_heads * self.head_size, self.decoder_seq_length
        target = target or source
        keys = (target + 1) / 2 if causal else target
        own = 4.0 * inner * d + (2 + self.gated) * self.ffn * d
        encoding = own * source, 2.0 * inner * source * source
        across = 2.0 * inner * d * (target + source)
        decoding = own * target + across, 2.0 * inner * target * (keys + source)
        blocks = [encoding] * self.encoder_num_layers + [decoding] * self.decoder_layers
        return blocks, float(d * self.vocab_size * target)

    def check_layout(self, layout: Any) -> None:
        """Refuse what is built for decoders alone, all of it at once."""
        asked = {
            f"--cp {layout.cp}": ("the encoder's rows are not dealt to ranks", "--cp 1", layout.cp > 1),
            f"--ep {layout.ep}": ("it has no experts", "--ep 1", layout.ep > 1),
            "--hybrid-context-parallel": (
                "it deals the documents of one stream anew, and T5 reads pairs of two",
                "--no-hybrid-context-parallel, with more --dp or --tp ranks instead",
                layout.hybrid_context_parallel,
            ),
            f"--attention-backend {layout.attention_backend}": (
                "its scores have a bias that is trained, so probabilities are formed", "--attention-backend auto",
                layout.attention_backend in ("flash", "fused"),
            ),
            f"--activation-budget-gib {layout.activation_budget_gib:g}": (
                "what its blocks cost to be computed again is not counted",
                "--activation-budget-gib 0, with --recompute full",
                layout.activation_budget_gib > 0,
            ),
            **{
                f"--{leaf}".replace("_", "-"): ("it is not built for two streams", f"--no-{leaf}".replace("_", "-"), on)
                for leaf in ("cpu_offloading", "distribute_saved_activations", "fp32_residual_connection")
                if (on := getattr(layout, leaf))
            },
        }  # fmt: skip
        found = [Problem(f"{given} with family t5", case, fix) for given, (case, fix, on) in asked.items() if on]
        if found:
            raise Refused(found)

    def ends_of(self, layers: range, first: bool, last: bool) -> tuple[str, ...]:
        """Modules that a stage has beside its blocks, in the order in which it holds them: the encoder's norm stands
        behind its last block, the decoder's tokens are embedded before its first.
        """
        middle = self.encoder_num_layers
        begins = middle in layers
        has = {
            "embed": first or begins,
            "dropout": first,
            "encoder_bias": bool(layers) and layers.start < middle,
            "encoder_norm": middle - 1 in layers,
            "decoder_dropout": begins,
            "decoder_bias": bool(layers) and layers.stop > middle,
            "norm": last,
            "head": last,
        }
        return tuple(name for name, there in has.items() if there)

    def holders(self, split: Sequence[range]) -> dict[str, tuple[int, ...]]:
        """Stages that hold what several hold: both embeddings and a tied output layer, and the biases."""
        middle, last = self.encoder_num_layers, len(split) - 1
        begins = next(s for s, blocks in enumerate(split) if middle in blocks)
        ends = (0, begins, *((last,) if self.tie_embeddings else ()))
        encoding = (s for s, blocks in enumerate(split) if blocks and blocks.start < middle)
        decoding = (s for s, blocks in enumerate(split) if blocks and blocks.stop > middle)
        return {
            "embed.weight": tuple(sorted(set(ends))),
            "encoder_bias.weight": tuple(encoding),
            "decoder_bias.weight": tuple(decoding),
        }

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        d, v, f = self.hidden_size, self.vocab_size, self.initializer_factor
        vocab = Split(0, (Part(v, padded=padded_vocab),))
        bias = (self.relative_attention_num_buckets, self.num_attention_heads)
        heads = Split(1, (Part(self.num_attention_heads),))
        ends = (
            Rule("embed.weight", (v, d), vocab, std=f),
            Rule("head.weight", (v, d), vocab, std=f),
            Rule("encoder_bias.weight", bias, heads, std=f * d**-0.5, decay=False),
            Rule("decoder_bias.weight", bias, heads, std=f * d**-0.5, decay=False),
        )
        cross = (rule for i in range(self.encoder_num_layers, self.num_layers) for rule in self._cross(i))
        norms = (Rule("*norm*.weight", (d,), init="ones", decay=False),)
        ties = (("head.weight", "embed.weight"),) if self.tie_embeddings else ()
        return Table((*ends, *self._block(), *cross, *norms), ties)

    def _block(self) -> tuple[Rule, ...]:
        """What every block has."""
        d, n, h, w, f = self.hidden_size, self.head_size, self.num_attention_heads, self.ffn, self.initializer_factor
        part, widths = Part(h, n), (Part(w),) * (1 + self.gated)
        up = "layers.*.mlp.gate_up.weight" if self.gated else "layers.*.mlp.up.weight"
        return (
            Rule("layers.*.attention.qkv.weight", (3 * h * n, d), Split(0, (part,) * 3), std=f * d**-0.5,
                 lesser=(h * n, n**-0.5)),
            Rule("layers.*.attention.out.weight", (d, h * n), Split(1, (part,)), std=f * (h * n) ** -0.5),
            Rule(up, (len(widths) * w, d), Split(0, widths), std=f * d**-0.5),
            Rule("layers.*.mlp.down.weight", (d, w), Split(1, (Part(w),)), std=f * w**-0.5),
        )  # fmt: skip

    def _cross(self, i: int) -> tuple[Rule, ...]:
        """What block i of the decoder has besides."""
        d, n, h, f = self.hidden_size, self.head_size, self.num_attention_heads, self.initializer_factor
        part, name = Part(h, n), f"layers.{i}.cross"
        return (
            Rule(f"{name}.q.weight", (h * n, d), Split(0, (part,)), std=f * (d * n) ** -0.5),
            Rule(f"{name}.kv.weight", (2 * h * n, d), Split(0, (part,) * 2), std=f * d**-0.5),
            Rule(f"{name}.out.weight", (d, h * n), Split(1, (part,)), std=f * (h * n) ** -0.5),
            Rule(f"layers.{i}.cross_norm.weight", (d,), init="ones", decay=False),
        )


def _v11(layers: int, hidden: int, heads: int, ffn: int) -> T5Config:
    return T5Config(layers, layers, hidden, heads, 64, ffn, 32128, 512, feed_forward_proj="gated-gelu",
                    tie_embeddings=False)  # fmt: skip


PRESETS: dict[str, T5Config] = {
    "t5-tiny": T5Config(2, 2, 64, 4, 16, 128, hidden_dropout=0.0, attention_dropout=0.0),
    "t5-small": T5Config(6, 6, 512, 8, 64, 2048, 32128, 512),
    "t5-base": T5Config(12, 12, 768, 12, 64, 3072, 32128, 512),
    "t5-large": T5Config(24, 24, 1024, 16, 64, 4096, 32128, 512),
    "t5-3b": T5Config(24, 24, 1024, 32, 128, 16384, 32128, 512),
    "t5-11b": T5Config(24, 24, 1024, 128, 128, 65536, 32128, 512),
    "t5-v1.1-small": _v11(8, 512, 6, 1024),
    "t5-v1.1-base": _v11(12, 768, 12, 2048),
    "t5-v1.1-large": _v11(24, 1024, 16, 2816),
    "t5-v1.1-xl": _v11(24, 2048, 32, 5120),
    "t5-v1.1-xxl": _v11(24, 4096, 64, 10240),
}
