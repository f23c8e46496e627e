"""Shapes of models that isotron cannot build yet, so that they can be planned and published runs compared. PURE.

Each is a config with a layout table like any other and a line in `unbuilt`. Sources: Jiang et al. 2024 (Mixtral),
DeepSeek-AI 2024 (DeepSeek-V3, table of section 4.2), Parmar et al. 2024 (Nemotron-4 15B).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.options import option

_UP = ("layers.*.mlp.gate_up.weight", "layers.*.mlp.down.weight")


@dataclass(frozen=True)
class UngatedConfig(LlamaConfig):
    """Nemotron-4: LLaMA's attention and a plain two-layer MLP (squared ReLU)."""

    family = "nemotron"
    unbuilt = "an MLP of squared ReLU"

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement."""
        table = super().layout(padded_vocab)
        up = Rule("layers.*.mlp.up.weight", (self.ffn, self.hidden_size), Split(0, (Part(self.ffn),)))
        return replace(table, rules=(up, *(r for r in table.rules if r.pattern != _UP[0])))


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """LLaMA blocks with experts; the first `dense_layers` have an MLP of width `ffn` instead.

    `latent`: ranks of multi-head latent attention (query, key/value, rotated part), empty for grouped queries.
    """

    family = "moe"

    experts: int = option(8, "experts per block")
    topk: int = option(2, "experts that a token visits")
    moe_ffn: int = option(0, "width of an expert")
    shared_ffn: int = option(0, "width of the shared expert; 0 means none")
    dense_layers: int = option(0, "blocks without experts, at the start")
    latent: tuple[int, ...] = option((), "ranks of latent attention")

    @property
    def unbuilt(self) -> str:
        """Why isotron cannot run it."""
        return "mixture of experts" + (" and latent attention" if self.latent else "")

    def visited(self, pattern: str) -> float:
        """The part of a matrix that one token is multiplied with."""
        return self.topk / self.experts if ".experts." in pattern else 1.0

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement; the experts' rows stand below each other."""
        table, d, f = super().layout(padded_vocab), self.hidden_size, self.moe_ffn or self.ffn
        rules = [r for r in table.rules if r.pattern not in _UP]
        for layer in self._expert_layers():
            rules += [
                Rule(f"{layer}.mlp.router.weight", (self.experts, d)),
                Rule(f"{layer}.mlp.experts.gate_up.weight", (2 * self.experts * f, d)),
                Rule(f"{layer}.mlp.experts.down.weight", (self.experts * d, f)),
            ]
            if self.shared_ffn:
                shared = Part(self.shared_ffn)
                rules += [
                    Rule(f"{layer}.mlp.shared.gate_up.weight", (2 * self.shared_ffn, d), Split(0, (shared, shared))),
                    Rule(f"{layer}.mlp.shared.down.weight", (d, self.shared_ffn), Split(1, (shared,))),
                ]
        dense = [replace(r, pattern=r.pattern.replace("*", str(i))) for i in range(self.dense_layers)
                 for r in table.rules if r.pattern in _UP]  # fmt: skip
        latent = self._attention()
        kept = [r for r in rules if not (latent and r.pattern == "layers.*.attention.qkv.weight")]
        return replace(table, rules=tuple([*dense, *latent, *kept]))

    def _expert_layers(self) -> list[str]:
        n = self.dense_layers
        return [f"layers.[!0-{n - 1}]", "layers.??"] if n else ["layers.*"]

    def _attention(self) -> list[Rule]:
        """The projections of latent attention; of plain attention only the output then remains."""
        if not self.latent:
            return []
        q, kv, turned = self.latent
        h, n, d = self.num_attention_heads, self.head_size, self.hidden_size
        heads, name = Part(h, n + turned), "layers.*.attention"
        return [
            Rule(f"{name}.q_down.weight", (q, d)),
            Rule(f"{name}.q_up.weight", (h * (n + turned), q), Split(0, (heads,))),
            Rule(f"{name}.kv_down.weight", (kv + turned, d)),
            Rule(f"{name}.kv_up.weight", (2 * h * n, kv), Split(0, (Part(h, 2 * n),))),
        ]


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
    "mixtral-8x7b": (
        MoEConfig(32, 4096, 32, 8, 0, 14336, 32000, 4096, experts=8, topk=2, moe_ffn=14336), 128, "h100", 4096, 512,
        1000.0),
    "deepseek-v3": (
        MoEConfig(61, 7168, 128, 128, 128, 18432, 129280, 4096, experts=256, topk=8, moe_ffn=2048, shared_ffn=2048,
                  dense_layers=3, latent=(1536, 512, 64)), 2048, "h800", 4096, 15360, 14800.0),
}  # fmt: skip
