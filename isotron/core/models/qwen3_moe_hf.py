"""Qwen3 with experts in Hugging Face's spelling: config.json both ways, names of tensors. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf, moe_hf, qwen3_hf
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped
from isotron.core.models.qwen3_moe_config import Qwen3MoeConfig

CONFIG = Qwen3MoeConfig
MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> Qwen3MoeConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("attention_bias", False)
    found = llama_hf.read_sizes(fields, kv_heads=4, ffn=6144, layers=24, vocab=151936, longest=32768, width=2048)
    layers = found["num_layers"]
    found |= moe_hf.read_sparse(fields, layers) | moe_hf.read_experts(fields, 128, 8, 768)
    used, size = fields.take("use_sliding_window", False), fields.take("sliding_window", 4096)
    fields.seen.add("max_window_layers")  # in older files, and without effect there
    found["sliding_window"] = size if used else 0
    fields.finish()
    return Qwen3MoeConfig(**found)


def write_config(cfg: Qwen3MoeConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, **moe_hf.PLAIN_ROUTER, moe_shared_expert_intermediate_size=0, first_window_layer=0)
    return {
        "attention_bias": False,
        **llama_hf.write_sizes(cfg),
        **moe_hf.write_experts(cfg),
        **moe_hf.write_sparse(cfg),
        "use_sliding_window": cfg.sliding_window > 0,
        "sliding_window": cfg.sliding_window or None,
    }


def tensors(cfg: Qwen3MoeConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = [*llama_hf.ends(cfg), *qwen3_hf.gains(cfg)]
    for i in range(cfg.num_layers):
        found += [*llama_hf.attention(cfg, i), *moe_hf.mlp(cfg, i), *llama_hf.norms(cfg, i)]
    return found
