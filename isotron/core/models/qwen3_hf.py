"""Qwen3 in Hugging Face's spelling: config.json both ways; LLaMA's names of tensors, and gains of q and k. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.models.qwen2_hf import read_window, write_window
from isotron.core.models.qwen3_config import Qwen3Config

CONFIG = Qwen3Config
MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> Qwen3Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("attention_bias", False)
    found = llama_hf.read_sizes(fields, kv_heads=32, head_dim=128, ffn=22016, vocab=151936, longest=32768)
    found |= read_window(fields, found["num_layers"])
    fields.finish()
    return Qwen3Config(**found)


def write_config(cfg: Qwen3Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return {"attention_bias": False, **llama_hf.write_sizes(cfg), **write_window(cfg)}


def tensors(cfg: Qwen3Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    return [*llama_hf.plain(cfg), *gains(cfg)]


def gains(cfg: LlamaShapes) -> list[Mapped]:
    """The norms on heads of queries and keys."""
    return [
        same(f"layers.{i}.attention.{x}_norm.weight", f"model.layers.{i}.self_attn.{x}_norm.weight", cfg.head_size)
        for i in range(cfg.num_layers)
        for x in ("q", "k")
    ]
