"""Qwen2 in Hugging Face's spelling: config.json both ways; LLaMA's names of tensors, and biases of q, k and v. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, stacked
from isotron.core.models.qwen2_config import Qwen2Config

CONFIG = Qwen2Config
MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> Qwen2Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    found = llama_hf.read_sizes(fields, kv_heads=32, ffn=22016, vocab=151936, longest=32768)
    found |= read_window(fields, found["num_layers"])
    fields.finish()
    return Qwen2Config(**found)


def write_config(cfg: Qwen2Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return {**llama_hf.write_sizes(cfg), **write_window(cfg)}


def read_window(fields: Fields, layers: int) -> dict[str, Any]:
    """The window, and the first layer that has it."""
    used, size = fields.take("use_sliding_window", False), fields.values.get("sliding_window", 4096)
    fields.seen.add("sliding_window")
    first = fields.take("max_window_layers", 28)
    window = size if used and size else 0
    kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    fields.need("layer_types", kinds)
    return {"sliding_window": window, "first_window_layer": first if window else 0}


def write_window(cfg: Any) -> dict[str, Any]:
    """The reverse of `read_window`."""
    on = cfg.sliding_window > 0
    first = cfg.first_window_layer if on else cfg.num_layers
    return {"use_sliding_window": on, "sliding_window": cfg.sliding_window or None, "max_window_layers": first}


def tensors(cfg: Qwen2Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    return [*llama_hf.plain(cfg), *biases(cfg)]


def biases(cfg: Qwen2Config) -> list[Mapped]:
    """The biases of queries, keys and values."""
    found = []
    for i in range(cfg.num_layers):
        parts = [(f"model.layers.{i}.self_attn.{x}_proj.bias", rows) for x, rows in llama_hf.qkv_rows(cfg).items()]
        found.append(stacked(f"layers.{i}.attention.qkv.bias", parts))
    return found
