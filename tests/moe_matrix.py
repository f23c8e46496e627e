"""The float64 matrix of models with experts: kinds of routing and balance x layouts and their
expert views x microbatches x recompute x ZeRO x dispatchers."""

from __future__ import annotations

from typing import Any

from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.models.gpt_oss_config import GptOssConfig
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.covering import Case as Choice

# the second half of a name is the expert view of the same ranks
LAYOUTS: dict[str, dict[str, int | bool]] = {
    "TP2+SPxPP2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "TP2 EP2": {"tp": 2, "ep": 2, "etp": 1},
    "TP2+SP ETP1": {"tp": 2, "etp": 1, "sequence_parallel": True},
    "DP2 ETP2": {"dp": 2, "etp": 2},
    "DP4 EP2": {"dp": 4, "ep": 2},
    "TP2+SPxDP2 EP2xETP2": {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
    "TP2xDP2 EP4": {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    "PP2xDP2 EP2": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1"},
}
LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


def mixtral(**fields: Any) -> MixtralConfig:
    """Three blocks, 8 experts, two per token."""
    sizes = {"ffn_hidden_size": 24, "vocab_size": 131, "max_position_embeddings": 16, "num_experts": 8}
    return MixtralConfig(3, 32, 4, 2, 8, **{**sizes, **LOSSES, **fields})  # type: ignore[arg-type]


MODELS: dict[str, Any] = {
    "global": mixtral(moe_router_load_balancing_type="global", moe_shared_expert_intermediate_size=16,
                      moe_shared_expert_gate=True, moe_layer_freq="[0]+[1]*2"),
    "groups": mixtral(moe_router_score_function="sigmoid", moe_router_num_groups=4, moe_router_group_topk=2,
                      moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05,
                      moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=16),
    "drop-first": mixtral(moe_expert_capacity_factor=0.75, moe_token_drop_policy="position", moe_norm_topk_prob=False,
                          moe_pad_expert_input_to_capacity=True, moe_input_jitter_eps=0.1),
    "gpt-oss": GptOssConfig(2, 32, 4, 2, 8, 24, 131, 16, num_experts=8, sliding_window=5, softmax_type="learnable",
                            swiglu_limit=0.3, **LOSSES),
    "mla": DeepseekV3Config(
        2, 32, 4, 4, 0, 48, 131, 16, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4,
        v_head_dim=5, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, moe_layer_freq="[0]+[1]",
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=4,
        moe_router_group_topk=2, moe_shared_expert_intermediate_size=16, attention_dropout=0.1,
        moe_expert_capacity_factor=1.0, mtp_num_layers=2, mtp_loss_scaling_factor=0.5, **LOSSES),
}  # fmt: skip

AXES = {
    "layout": tuple(LAYOUTS),
    "model": tuple(MODELS),
    "microbatch": (1, 2),
    "recompute": ("none", "selective", "full"),
    "zero": (0, 1, 2, 3),
    "dispatcher": ("alltoall", "allgather", "halves"),  # halves: of a microbatch, each sent by alltoall
}
PLAIN: Choice = {
    "layout": "1",
    "model": "groups",
    "microbatch": 2,
    "recompute": "none",
    "zero": 0,
    "dispatcher": "alltoall",
}


def case_of(choice: Choice, steps: int = 2) -> Case:
    """Some steps of four samples of 16 tokens."""
    sizes: Any = {"dp": 1, **LAYOUTS.get(choice["layout"], {})}
    cut = Layout(
        **sizes,
        recompute=choice["recompute"],
        zero=choice["zero"],
        moe_token_dispatcher_type="allgather" if choice["dispatcher"] == "allgather" else "alltoall",
        overlap_moe_expert_parallel_comm=choice["dispatcher"] == "halves",
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    # in four data-parallel ranks the step is one microbatch of one sample on each
    micro = min(choice["microbatch"], 4 // max(cut.dp, 1))
    return Case(MODELS[choice["model"]], cut, sequence=16, micro_batch=micro, global_batch=4, steps=steps)
