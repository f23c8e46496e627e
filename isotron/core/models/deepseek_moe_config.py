"""DeepSeekMoE 16B: configuration, presets and layout table. PURE; the modules are in `deepseek_moe.py`.

Notable: LLaMA's attention; after one block with an MLP, 64 finely cut experts, 6 per token by softmax scores that need
not sum to 1, and two experts' width that every token visits. Source: Dai et al. 2024 (DeepSeekMoE), sections 3 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.nn.moe_config import MoEConfig, with_experts


@dataclass(frozen=True)
class DeepseekMoEConfig(MoEConfig, LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "deepseek_moe"

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        return with_experts(self, super().layout(padded_vocab))


PRESETS: dict[str, DeepseekMoEConfig] = {
    "deepseek-moe-16b": DeepseekMoEConfig(
        28, 2048, 16, 16, 0, 10944, 102400, 4096, 1e-6, num_experts=64, moe_router_topk=6, moe_ffn_hidden_size=1408,
        moe_layer_freq="[0]*1+[1]*27", moe_norm_topk_prob=False, moe_shared_expert_intermediate_size=2816,
        moe_aux_loss_coeff=0.001,
    ),
}  # fmt: skip
