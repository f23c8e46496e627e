"""Qwen2 with experts: configuration, presets and layout table. PURE; the modules are in `qwen2_moe.py`.

Notable: Qwen2's attention; finely cut experts whose weights need not sum to 1; an expert that
every token visits, behind a sigmoid gate. Source: Qwen team 2024 (Qwen1.5-MoE; Qwen2), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Table
from isotron.core.models.qwen2_config import Qwen2Config
from isotron.core.nn.moe_config import MoEConfig, with_experts


@dataclass(frozen=True)
class Qwen2MoeConfig(MoEConfig, Qwen2Config):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "qwen2_moe"

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        return with_experts(self, super().layout(padded_vocab))


PRESETS: dict[str, Qwen2MoeConfig] = {
    "qwen1.5-moe-a2.7b": Qwen2MoeConfig(
        24, 2048, 16, 16, 0, 5632, 151936, 8192, 1e-6, rope_theta=1000000.0, num_experts=60, moe_router_topk=4,
        moe_ffn_hidden_size=1408, moe_norm_topk_prob=False, moe_aux_loss_coeff=0.001,
        moe_shared_expert_intermediate_size=5632, moe_shared_expert_gate=True,
    ),
}  # fmt: skip
