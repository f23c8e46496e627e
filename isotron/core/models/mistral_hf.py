"""Mistral in Hugging Face's spelling: config.json both ways; tensors are named as LLaMA's. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.mistral_config import MistralConfig

CONFIG = MistralConfig
MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED
tensors = llama_hf.plain


def read_config(values: Mapping[str, Any], where: str) -> MistralConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.seen.add("sliding_window")  # null means no window, absent means the library's default
    window = values.get("sliding_window", 4096) or 0
    found = llama_hf.read_sizes(fields, kv_heads=8, ffn=14336, longest=4096 * 32)
    fields.need("layer_types", ["sliding_attention" if window else "full_attention"] * found["num_layers"])
    fields.finish()
    return MistralConfig(**found, sliding_window=window)


def write_config(cfg: MistralConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return {**llama_hf.write_sizes(cfg), "sliding_window": cfg.sliding_window or None}
