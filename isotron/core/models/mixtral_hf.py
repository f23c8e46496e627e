"""Mixtral in Hugging Face's spelling: config.json both ways, names of tensors. PURE.

A file may hold one tensor per expert and matrix (w1 is the gate, w3 up, w2 down), as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped, same
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.models.moe_hf import PLAIN_ROUTER, experts

CONFIG = MixtralConfig
MODEL_TYPE = "mixtral"
ARCHITECTURE = "MixtralForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> MixtralConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    found = llama_hf.read_sizes(fields, kv_heads=8, ffn=14336, longest=4096 * 32, epsilon=1e-5, theta=1e6)
    window = fields.take("sliding_window", 0)
    found |= {
        "num_experts": fields.take("num_local_experts", 8, "num_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok", 2),
        "moe_aux_loss_coeff": float(fields.take("router_aux_loss_coef", 0.001)),
        "moe_input_jitter_eps": float(fields.take("router_jitter_noise", 0.0)),
    }
    fields.seen.add("output_router_logits")  # what their forward returns; no weight depends on it
    fields.finish()
    return MixtralConfig(**found, sliding_window=window)


def write_config(cfg: MixtralConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, **PLAIN_ROUTER, moe_norm_topk_prob=True, moe_layer_freq="1",
                    moe_shared_expert_intermediate_size=0)  # fmt: skip
    return {
        **llama_hf.write_sizes(cfg),
        "sliding_window": cfg.sliding_window or None,
        "intermediate_size": cfg.expert_width,
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.moe_router_topk,
        "router_aux_loss_coef": cfg.moe_aux_loss_coeff,
        "router_jitter_noise": cfg.moe_input_jitter_eps,
        "output_router_logits": False,
    }


def tensors(cfg: MixtralConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = llama_hf.ends(cfg)
    for i in range(cfg.num_layers):
        theirs, ours = f"model.layers.{i}.block_sparse_moe", f"layers.{i}.mlp"
        found += [*llama_hf.attention(cfg, i), *llama_hf.norms(cfg, i)]
        found.append(same(f"{ours}.router.weight", f"{theirs}.gate.weight", cfg.num_experts))
        found += experts(cfg, f"{ours}.experts", f"{theirs}.experts", ("w1", "w3", "w2"))
    return found
