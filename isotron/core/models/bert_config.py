"""BERT: configuration, presets and layout table. PURE; the modules are in `bert.py`.

Notable: every token sees its whole row, or its document; words, learned positions and types of tokens are added, with a
norm behind them; norms stand on the residual stream, behind each sum; what is predicted are words that were masked, by
one more layer with GELU and a norm, and a tied output layer with a bias of its own. `norm_placement` pre is Megatron's:
norms before attention and MLP and behind the last block, none behind the embeddings, and branches begin smaller.
Sources: Devlin et al. 2019, sections 3 and 3.1; Shoeybi et al. 2019 (Megatron-LM), section 5.3 and figure 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from isotron.core.errors import Problem, Refused
from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.options import option


@dataclass(frozen=True)
class BertConfig(GPTConfig):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "bert"
    causal = False  # tokens see what comes after them

    norm_epsilon: float = option(1e-12, "added to the variance in LayerNorm")
    type_vocab_size: int = option(2, "types of tokens that have an embedding")
    norm_placement: str = option(
        "post",
        "norms: post, on the residual stream behind each sum (BERT's own), or pre, before attention and MLP (Megatron)",
        choices=("post", "pre"),
    )

    @property
    def norms_after(self) -> bool:
        """Whether the norms of a block stand behind what they norm."""
        return self.norm_placement == "post"

    @property
    def norms_of_sums(self) -> bool:
        """Whether what they norm is the residual stream with what was added to it."""
        return self.norms_after

    @property
    def branch_std(self) -> float:
        """Standard deviation of what ends attention and MLP: under norms behind the sums that of everything else."""
        return self.init_method_std if self.norms_after else super().branch_std

    def check_layout(self, layout: Any) -> None:
        """Refuse what is built for decoders alone, all of it at once."""
        narrow = self.norms_after and layout.fp32_residual_connection
        asked = {
            f"--ep {layout.ep}": ("it has no experts", "--ep 1", layout.ep > 1),
            "--hybrid-context-parallel": (
                "its rows are not dealt document by document", "--no-hybrid-context-parallel",
                layout.hybrid_context_parallel,
            ),
            "--fp32-residual-connection": (
                "each norm stands on the residual stream and gives it the type of the weights",
                "--no-fp32-residual-connection, or --norm-placement pre", narrow,
            ),
        }  # fmt: skip
        found = [Problem(f"{given} with family bert", case, fix) for given, (case, fix, on) in asked.items() if on]
        if found:
            raise Refused(found)

    def ends_of(self, layers: range, first: bool, last: bool) -> tuple[str, ...]:
        """Modules that a stage has beside its blocks, in the order in which it holds them."""
        post = self.norms_after
        before = ("embed", "positions", "types", *(("embed_norm",) if post else ()), "dropout")
        behind = (*(() if post else ("final_norm",)), "transform", "norm", "head")
        return (*(before if first else ()), *(behind if last else ()))

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table, d, v, std = super().layout(padded_vocab), self.hidden_size, self.vocab_size, self.init_method_std
        rules = (
            Rule("types.weight", (self.type_vocab_size, d), std=std),
            Rule("transform.weight", (d, d), std=std),
            Rule("transform.bias", (d,), init="zeros", decay=False),
            Rule("head.bias", (v,), Split(0, (Part(v, padded=padded_vocab),)), init="zeros", decay=False),
        )
        return replace(table, rules=(*rules, *table.rules))


def _megatron(layers: int, hidden: int, heads: int) -> BertConfig:
    """One of the sizes in Shoeybi et al. 2019, section 5.3."""
    return BertConfig(layers, hidden, heads, vocab_size=30522, max_position_embeddings=512, norm_epsilon=1e-5,
                      norm_placement="pre")  # fmt: skip


PRESETS: dict[str, BertConfig] = {
    "bert-tiny": BertConfig(2, 64, 4, hidden_dropout=0.0, attention_dropout=0.0),
    "bert-base": BertConfig(12, 768, 12, vocab_size=30522, max_position_embeddings=512),
    "bert-large": BertConfig(24, 1024, 16, vocab_size=30522, max_position_embeddings=512),
    "megatron-bert-336m": _megatron(24, 1024, 16),
    "megatron-bert-1.3b": _megatron(24, 2048, 32),
    "megatron-bert-3.9b": _megatron(48, 2560, 40),
}
