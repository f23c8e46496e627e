"""DeepSeekMoE in Hugging Face's spelling, as published with the model: config.json both ways, names. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import deepseek_hf, llama_hf, moe_hf
from isotron.core.models.deepseek_moe_config import DeepseekMoEConfig
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped

CONFIG = DeepseekMoEConfig
MODEL_TYPE = "deepseek"
ARCHITECTURE = "DeepseekForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> DeepseekMoEConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("scoring_func", "softmax")
    fields.need("attention_bias", False)
    found = llama_hf.read_sizes(fields)
    found |= deepseek_hf.read_dense_first(fields, found["num_layers"], 0)
    width = fields.take("moe_intermediate_size", 1407)
    found |= {
        "num_experts": fields.take("n_routed_experts", 64),
        "moe_router_topk": fields.take("num_experts_per_tok", 6),
        "moe_ffn_hidden_size": width,
        "moe_norm_topk_prob": fields.take("norm_topk_prob", False),
        "moe_aux_loss_coeff": float(fields.take("aux_loss_alpha", 0.001)),
    }
    found |= deepseek_hf.read_shared(fields, width, 2)
    fields.need("seq_aux", True)
    fields.finish()
    return DeepseekMoEConfig(**found)


def write_config(cfg: DeepseekMoEConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, **moe_hf.PLAIN_ROUTER, moe_shared_expert_gate=False)
    return {
        **llama_hf.write_sizes(cfg),
        **deepseek_hf.write_dense_first(cfg),
        "attention_bias": False,
        "n_routed_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.moe_router_topk,
        "moe_intermediate_size": cfg.expert_width,
        "n_shared_experts": cfg.shared_width // cfg.expert_width,
        "norm_topk_prob": cfg.moe_norm_topk_prob,
        "scoring_func": "softmax",
        "aux_loss_alpha": cfg.moe_aux_loss_coeff,
        "seq_aux": True,
    }


def tensors(cfg: DeepseekMoEConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = llama_hf.ends(cfg)
    for i in range(cfg.num_layers):
        found += [*llama_hf.attention(cfg, i), *moe_hf.mlp(cfg, i, "shared_experts"), *llama_hf.norms(cfg, i)]
    return found
