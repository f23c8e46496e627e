"""DeepSeek-V2 in Hugging Face's spelling: config.json both ways, names of tensors. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import deepseek_hf, llama_hf
from isotron.core.models.deepseek_v2_config import DeepseekV2Config
from isotron.core.models.hf_fields import Fields, written_only_if

CONFIG = DeepseekV2Config
MODEL_TYPE = "deepseek_v2"
ARCHITECTURE = "DeepseekV2ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED
tensors = deepseek_hf.tensors


def read_config(values: Mapping[str, Any], where: str) -> DeepseekV2Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("scoring_func", "softmax")
    fields.need("norm_topk_prob", False)
    fields.need("ep_size", 1)
    fields.need("mlp_bias", False)
    found = llama_hf.read_sizes(fields, ffn=11008, vocab=102400, width=4096)
    found |= deepseek_hf.read_latent(fields, found["num_attention_heads"])
    found |= deepseek_hf.read_dense_first(fields, found["num_layers"], 0)
    width = fields.take("moe_intermediate_size", 1407)
    limited = fields.take("topk_method", "greedy") == "group_limited_greedy"
    fields.need("topk_method", "greedy", "group_limited_greedy")
    groups, chosen = fields.take("n_group", 0), fields.take("topk_group", 0)
    found |= {
        "num_experts": fields.take("n_routed_experts", 64),
        "moe_router_topk": fields.take("num_experts_per_tok", 6),
        "moe_ffn_hidden_size": width,
        "moe_norm_topk_prob": False,
        "moe_router_num_groups": groups if limited else 0,
        "moe_router_group_topk": chosen if limited else 0,
        "moe_router_group_scores": 1 if limited else 0,
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
        "moe_aux_loss_coeff": float(fields.take("aux_loss_alpha", 0.0)),
    }
    found |= deepseek_hf.read_shared(fields, width, 2)
    fields.need("seq_aux", True)
    fields.seen.add("output_router_logits")
    fields.finish()
    return DeepseekV2Config(**found)


def write_config(cfg: DeepseekV2Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(
        cfg, MODEL_TYPE, moe_router_score_function="softmax", moe_router_enable_expert_bias=False,
        moe_norm_topk_prob=False, moe_router_group_scores=int(cfg.moe_router_num_groups > 0),
        moe_shared_expert_gate=False,
    )  # fmt: skip
    return {
        **deepseek_hf.write_latent(cfg),
        **deepseek_hf.write_dense_first(cfg),
        "n_routed_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.moe_router_topk,
        "moe_intermediate_size": cfg.expert_width,
        "n_shared_experts": cfg.shared_width // cfg.expert_width,
        "norm_topk_prob": False,
        "n_group": cfg.moe_router_num_groups or None,
        "topk_group": cfg.moe_router_group_topk or None,
        "topk_method": "group_limited_greedy" if cfg.moe_router_num_groups else "greedy",
        "routed_scaling_factor": cfg.moe_router_topk_scaling_factor,
        "scoring_func": "softmax",
        "aux_loss_alpha": cfg.moe_aux_loss_coeff,
        "seq_aux": True,
        "mlp_bias": False,
    }
