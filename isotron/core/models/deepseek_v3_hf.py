"""DeepSeek-V3 in Hugging Face's spelling: config.json both ways, names of tensors. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import deepseek_hf, llama_hf, moe_hf
from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped, same

CONFIG = DeepseekV3Config
MODEL_TYPE = "deepseek_v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"
PREFIX, HEAD, EMBEDDING = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING
IGNORED = (*llama_hf.IGNORED, "model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")


def read_config(values: Mapping[str, Any], where: str) -> DeepseekV3Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("scoring_func", "sigmoid")
    fields.need("topk_method", "noaux_tc")
    fields.need("ep_size", 1)
    found = llama_hf.read_sizes(fields, kv_heads=128, ffn=18432, layers=61, vocab=129280, longest=4096, width=7168,
                                heads=128)  # fmt: skip
    found |= deepseek_hf.read_latent(fields, found["num_attention_heads"])
    found |= deepseek_hf.read_dense_first(fields, found["num_layers"], 3)
    width = fields.take("moe_intermediate_size", 2048)
    groups = fields.take("n_group", 8)
    found |= {
        "num_experts": fields.take("n_routed_experts", 256, "num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": width,
        "moe_norm_topk_prob": fields.take("norm_topk_prob", True),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": fields.take("topk_group", 4),
        "moe_router_group_scores": 2,
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 2.5)),
        "moe_aux_loss_coeff": float(fields.take("aux_loss_alpha", 0.0)),
    }
    found |= deepseek_hf.read_shared(fields, width, 1)
    fields.need("seq_aux", True)
    found["mtp_num_layers"] = fields.take("num_nextn_predict_layers", 1, "num_mtp_layers")
    fields.seen.add("output_router_logits")
    fields.finish()
    return DeepseekV3Config(**found)


def write_config(cfg: DeepseekV3Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(
        cfg, MODEL_TYPE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        group_scores=2, moe_shared_expert_gate=False,
    )  # fmt: skip
    return {
        **deepseek_hf.write_latent(cfg),
        **deepseek_hf.write_dense_first(cfg),
        "n_routed_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.moe_router_topk,
        "moe_intermediate_size": cfg.expert_width,
        "n_shared_experts": cfg.shared_width // cfg.expert_width,
        "norm_topk_prob": cfg.moe_norm_topk_prob,
        "n_group": cfg.moe_router_num_groups,
        "topk_group": cfg.moe_router_group_topk,
        "routed_scaling_factor": cfg.moe_router_topk_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "aux_loss_alpha": cfg.moe_aux_loss_coeff,
        "seq_aux": True,
        "num_nextn_predict_layers": cfg.mtp_num_layers,
        "rope_interleave": True,
    }


def tensors(cfg: DeepseekV3Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs; modules for further tokens are blocks after the last one there."""
    found = deepseek_hf.tensors(cfg)
    for k in range(cfg.mtp_num_layers):
        ours, theirs, d = f"mtp.{k}", f"model.layers.{cfg.num_layers + k}", cfg.hidden_size
        names = {"enorm": "enorm", "hnorm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
        names |= {"block.attention_norm": "input_layernorm", "block.mlp_norm": "post_attention_layernorm"}
        found += [same(f"{ours}.{a}.weight", f"{theirs}.{b}.weight", d) for a, b in names.items()]
        found += deepseek_hf.latent(cfg, f"{ours}.block.attention", f"{theirs}.self_attn")
        found += moe_hf.expert_mlp(cfg, f"{ours}.block.mlp", f"{theirs}.mlp", "shared_experts")
    return found
