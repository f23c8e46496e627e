"""Qwen3 with experts: configuration, presets and layout table. PURE; the modules are in `qwen3_moe.py`.

Notable: Qwen3's attention with norms on each head; 128 finely cut experts, 8 per token, weights
that sum to 1, no shared expert. Source: Qwen team 2025 (Qwen3), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Table
from isotron.core.models.qwen3_config import Qwen3Config
from isotron.core.nn.moe_config import MoEConfig, with_experts


@dataclass(frozen=True)
class Qwen3MoeConfig(MoEConfig, Qwen3Config):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "qwen3_moe"

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        return with_experts(self, super().layout(padded_vocab))


PRESETS: dict[str, Qwen3MoeConfig] = {
    "qwen3-30b-a3b": Qwen3MoeConfig(
        48, 2048, 32, 4, 128, 6144, 151936, 40960, 1e-6, rope_theta=1000000.0, num_experts=128, moe_router_topk=8,
        moe_ffn_hidden_size=768, moe_aux_loss_coeff=0.001,
    ),
    "qwen3-235b-a22b": Qwen3MoeConfig(
        94, 4096, 64, 4, 128, 12288, 151936, 40960, 1e-6, rope_theta=1000000.0, num_experts=128, moe_router_topk=8,
        moe_ffn_hidden_size=1536, moe_aux_loss_coeff=0.001,
    ),
}  # fmt: skip
