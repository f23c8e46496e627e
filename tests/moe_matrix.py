"""The float64 matrix of models with experts: kinds of routing and balance x layouts x microbatches x recompute."""

from __future__ import annotations

from typing import Any

from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.covering import Case as Choice

LAYOUTS: dict[str, dict[str, int | bool]] = {
    "1": {},
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "DP2": {"dp": 2},
    "TP2+SPxPP2": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


def mixtral(**fields: Any) -> MixtralConfig:
    """Three blocks, 6 experts, two per token."""
    sizes = {"ffn_hidden_size": 24, "vocab_size": 131, "max_position_embeddings": 16, "num_experts": 6}
    return MixtralConfig(3, 32, 4, 2, 8, **{**sizes, **LOSSES, **fields})  # type: ignore[arg-type]


MODELS: dict[str, Any] = {
    "global": mixtral(moe_router_load_balancing_type="global", moe_shared_expert_intermediate_size=16,
                      moe_shared_expert_gate=True, moe_layer_freq="[0]+[1]*2"),
    "groups": mixtral(moe_router_score_function="sigmoid", moe_router_num_groups=3, moe_router_group_topk=2,
                      moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05,
                      moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=16),
    "drop": mixtral(moe_expert_capacity_factor=1.0),
    "drop-first": mixtral(moe_expert_capacity_factor=0.75, moe_token_drop_policy="position", moe_norm_topk_prob=False,
                          moe_pad_expert_input_to_capacity=True, moe_input_jitter_eps=0.1),
    "mla": DeepseekV3Config(
        3, 32, 4, 4, 0, 48, 131, 16, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4,
        v_head_dim=5, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, moe_layer_freq="[0]+[1]*2",
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=4,
        moe_router_group_topk=2, moe_shared_expert_intermediate_size=16, attention_dropout=0.1,
        mtp_num_layers=2, mtp_loss_scaling_factor=0.5, **LOSSES),
}  # fmt: skip

AXES = {
    "layout": tuple(LAYOUTS),
    "model": tuple(MODELS),
    "microbatch": (1, 2),
    "recompute": ("none", "selective", "full"),
}


def case_of(choice: Choice) -> Case:
    """Two steps of four samples of 16 tokens."""
    sizes: Any = {"dp": 1, **LAYOUTS[choice["layout"]]}
    cut = Layout(**sizes, recompute=choice["recompute"], make_vocab_size_divisible_by=8, ddp_bucket_size=3000)
    model = MODELS[choice["model"]]
    return Case(model, cut, sequence=16, micro_batch=choice["microbatch"], global_batch=4, steps=2)
