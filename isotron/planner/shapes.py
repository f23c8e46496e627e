"""The milestones, and shapes of models of published runs that are no family of isotron's. PURE.

The latter are configs with a layout table like any other. Sources: Jiang et al. 2024 (Mixtral), DeepSeek-AI 2024
(DeepSeek-V3, table of section 4.2), Parmar et al. 2024 (Nemotron-4 15B).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models import deepseek_v3_config, mixtral_config
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.options import option

_UP = ("layers.*.mlp.gate_up.weight", "layers.*.mlp.down.weight")


@dataclass(frozen=True)
class UngatedConfig(LlamaShapes):
    """Nemotron-4: LLaMA's attention and a plain two-layer MLP (squared ReLU)."""

    family = "nemotron"

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement."""
        table = super().layout(padded_vocab)
        up = Rule("layers.*.mlp.up.weight", (self.ffn, self.hidden_size), Split(0, (Part(self.ffn),)))
        return replace(table, rules=(up, *(r for r in table.rules if r.pattern != _UP[0])))


@dataclass(frozen=True)
class MoEConfig(LlamaShapes):
    """LLaMA blocks with experts, whole and dealt to ranks, as frameworks of published runs have them."""

    family = "moe"

    experts: int = option(8, "experts per block")
    topk: int = option(2, "experts that a token visits")
    moe_ffn: int = option(0, "width of an expert")
    window: int = option(0, "tokens that every second block looks back at; 0 means all")

    def attended(self, seq: int) -> float:
        """Keys of a query on average, over blocks and places."""
        whole = (seq + 1) / 2
        return (whole + min(whole, self.window)) / 2 if self.window else whole

    def visited(self, pattern: str) -> float:
        """The part of a matrix that one token is multiplied with."""
        return self.topk / self.experts if ".experts." in pattern else 1.0

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement; the experts' rows stand below each other."""
        table, d, f = super().layout(padded_vocab), self.hidden_size, self.moe_ffn or self.ffn
        rules = (
            *(r for r in table.rules if r.pattern not in _UP),
            Rule("layers.*.mlp.router.weight", (self.experts, d)),
            Rule("layers.*.mlp.experts.gate_up.weight", (2 * self.experts * f, d)),
            Rule("layers.*.mlp.experts.down.weight", (self.experts * d, f)),
        )
        return replace(table, rules=rules)


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> GPTConfig:
    return GPTConfig(layers, hidden, heads, 0, vocab, positions, hidden_dropout=0.1, attention_dropout=0.0)


# milestones by name: (model, devices, device, sequence, sequences per step, tokens of the run in billions)
MILESTONES: dict[str, tuple[Any, int, str, int, int, float]] = {
    "megatron-8.3b": (_gpt(72, 3072, 24, positions=1024), 512, "v100", 1024, 512, 157.0),
    "gpt3-175b": (_gpt(96, 12288, 96), 1024, "a100-80", 2048, 1536, 300.0),
    "mt-nlg-530b": (_gpt(105, 20480, 128), 2240, "a100-80", 2048, 1920, 270.0),
    "gpt-1t": (_gpt(128, 25600, 160), 3072, "a100-80", 2048, 3072, 450.0),
    "llama3-8b": (
        LlamaConfig(32, 4096, 32, 8, 0, 14336, 128256, 8192, rope_theta=500000.0), 64, "h100", 8192, 512, 15000.0),
    "llama3-70b": (
        LlamaConfig(80, 8192, 64, 8, 0, 28672, 128256, 8192, rope_theta=500000.0), 512, "h100", 8192, 1024, 15000.0),
    "llama3-405b": (
        LlamaConfig(126, 16384, 128, 8, 0, 53248, 128256, 8192, rope_theta=500000.0), 16384, "h100", 8192, 2048,
        15600.0),
    "mixtral-8x7b": (mixtral_config.PRESETS["mixtral-8x7b"], 128, "h100", 4096, 512, 1000.0),
    "deepseek-v3": (deepseek_v3_config.PRESETS["deepseek-v3"], 2048, "h800", 4096, 15360, 14800.0),
}  # fmt: skip
