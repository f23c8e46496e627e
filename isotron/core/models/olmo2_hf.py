"""OLMo 2 in Hugging Face's spelling: config.json both ways; LLaMA's names but for the norms. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same
from isotron.core.models.olmo2_config import Olmo2Config

CONFIG = Olmo2Config
MODEL_TYPE = "olmo2"
ARCHITECTURE = "Olmo2ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> Olmo2Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("attention_bias", False)
    found = llama_hf.read_sizes(fields, vocab=50304, epsilon=1e-5)
    fields.finish()
    return Olmo2Config(**found)


def write_config(cfg: Olmo2Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return {"attention_bias": False, **llama_hf.write_sizes(cfg)}


def tensors(cfg: Olmo2Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = llama_hf.ends(cfg)
    for i in range(cfg.num_layers):
        found += [*llama_hf.attention(cfg, i), *llama_hf.mlp(cfg, i), *norms(cfg, i)]
    return found


def norms(cfg: Olmo2Config, i: int) -> list[Mapped]:
    """The norms of layer i: of the results, and over the heads of queries and keys."""
    rows, theirs = llama_hf.qkv_rows(cfg), f"model.layers.{i}"
    return [
        same(f"layers.{i}.attention_norm.weight", f"{theirs}.post_attention_layernorm.weight", cfg.hidden_size),
        same(f"layers.{i}.mlp_norm.weight", f"{theirs}.post_feedforward_layernorm.weight", cfg.hidden_size),
        *(same(f"layers.{i}.attention.{x}_norm.weight", f"{theirs}.self_attn.{x}_norm.weight", rows[x]) for x in "qk"),
    ]
