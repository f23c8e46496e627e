"""Qwen2 with experts in Hugging Face's spelling: config.json both ways, names of tensors. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf, moe_hf, qwen2_hf
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped
from isotron.core.models.qwen2_moe_config import Qwen2MoeConfig

CONFIG = Qwen2MoeConfig
MODEL_TYPE = "qwen2_moe"
ARCHITECTURE = "Qwen2MoeForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> Qwen2MoeConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("qkv_bias", True)
    fields.need("use_sliding_window", False)
    fields.seen.update(("sliding_window", "max_window_layers"))  # without effect then
    found = llama_hf.read_sizes(fields, kv_heads=16, ffn=5632, layers=24, vocab=151936, longest=32768, width=2048,
                                heads=16)  # fmt: skip
    layers = found["num_layers"]
    fields.need("layer_types", ["full_attention"] * layers)
    found |= moe_hf.read_sparse(fields, layers) | moe_hf.read_experts(fields, 60, 4, 1408)
    found["moe_shared_expert_intermediate_size"] = fields.take("shared_expert_intermediate_size", 5632)
    found["moe_shared_expert_gate"] = True
    fields.finish()
    return Qwen2MoeConfig(**found)


def write_config(cfg: Qwen2MoeConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, **moe_hf.PLAIN_ROUTER, moe_shared_expert_gate=True, sliding_window=0)
    return {
        **llama_hf.write_sizes(cfg),
        **moe_hf.write_experts(cfg),
        **moe_hf.write_sparse(cfg),
        "shared_expert_intermediate_size": cfg.shared_width,
        "qkv_bias": True,
        "use_sliding_window": False,
    }


def tensors(cfg: Qwen2MoeConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = [*llama_hf.ends(cfg), *qwen2_hf.biases(cfg)]
    for i in range(cfg.num_layers):
        found += [*llama_hf.attention(cfg, i), *moe_hf.mlp(cfg, i), *llama_hf.norms(cfg, i)]
    return found
