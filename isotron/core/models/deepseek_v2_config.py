"""DeepSeek-V2 and V2-Lite: configuration, presets and layout table. PURE; the modules are in `deepseek_v2.py`.

Notable: as V3 with softmax scores whose weights need not sum to 1, groups ranked by their best score, no selection
bias. Source: DeepSeek-AI 2024a (DeepSeek-V2), sections 2.1 to 2.2 and appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.models.deepseek_v3_config import DeepseekV3Config


@dataclass(frozen=True)
class DeepseekV2Config(DeepseekV3Config):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "deepseek_v2"


PRESETS: dict[str, DeepseekV2Config] = {
    "deepseek-v2": DeepseekV2Config(
        60, 5120, 128, 128, 0, 12288, 102400, 163840, 1e-6, rope_theta=10000.0, rope_scaling="yarn", rope_factor=40.0,
        rope_original_positions=4096, rope_mscale=0.707, rope_mscale_all_dim=0.707, q_lora_rank=1536,
        kv_lora_rank=512, num_experts=160, moe_router_topk=6, moe_ffn_hidden_size=1536,
        moe_layer_freq="[0]*1+[1]*59", moe_norm_topk_prob=False, moe_router_num_groups=8, moe_router_group_topk=3,
        moe_router_group_scores=1, moe_router_topk_scaling_factor=16.0, moe_shared_expert_intermediate_size=3072,
        moe_aux_loss_coeff=0.001,
    ),
    "deepseek-v2-lite": DeepseekV2Config(
        27, 2048, 16, 16, 0, 10944, 102400, 163840, 1e-6, rope_theta=10000.0, rope_scaling="yarn", rope_factor=40.0,
        rope_original_positions=4096, rope_mscale=0.707, rope_mscale_all_dim=0.707, kv_lora_rank=512, num_experts=64,
        moe_router_topk=6, moe_ffn_hidden_size=1408, moe_layer_freq="[0]*1+[1]*26", moe_norm_topk_prob=False,
        moe_shared_expert_intermediate_size=2816, moe_aux_loss_coeff=0.001,
    ),
}  # fmt: skip
