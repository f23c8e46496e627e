"""Phi-3 in Hugging Face's spelling: config.json both ways; their projections are fused as ours. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same
from isotron.core.models.phi3_config import Phi3Config

CONFIG = Phi3Config
MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


def read_config(values: Mapping[str, Any], where: str) -> Phi3Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields({"original_max_position_embeddings": 4096, **values}, where)
    fields.need("attention_bias", False)
    window, hidden = fields.take("sliding_window", 0), float(fields.take("resid_pdrop", 0.0))
    fields.need("embd_pdrop", hidden, 0.0)
    found = llama_hf.read_sizes(fields, ffn=8192, vocab=32064, longest=4096, epsilon=1e-5, width=3072)
    if found["rope_scaling"] == "yarn":  # a spelling of early files
        found["rope_scaling"] = "longrope"
    fields.finish()
    return Phi3Config(**found, hidden_dropout=hidden, sliding_window=window)


def write_config(cfg: Phi3Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    found = llama_hf.write_sizes(cfg)
    del found["head_dim"]
    longest = cfg.rope_original_positions or cfg.max_position_embeddings
    if cfg.rope_scaling == "longrope":  # older libraries accept exactly these three
        kept = ("type", "short_factor", "long_factor")
        extra = ("attention_factor", "factor") if cfg.rope_attention_factor or cfg.rope_factor else ()
        found["rope_scaling"] = {k: v for k, v in found["rope_scaling"].items() if k in (*kept, *extra)}
    return {
        **found,
        "original_max_position_embeddings": longest,
        "resid_pdrop": cfg.hidden_dropout,
        "embd_pdrop": cfg.hidden_dropout,
        "sliding_window": cfg.sliding_window or None,
    }


def tensors(cfg: Phi3Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    blocks = [m for i in range(cfg.num_layers) for m in (*_layer(cfg, i), *llama_hf.norms(cfg, i))]
    return [*llama_hf.ends(cfg), *blocks]


def _layer(cfg: Phi3Config, i: int) -> list[Mapped]:
    theirs, ours, d = f"model.layers.{i}", f"layers.{i}", cfg.hidden_size
    rows = sum(llama_hf.qkv_rows(cfg).values())
    return [
        same(f"{ours}.attention.qkv.weight", f"{theirs}.self_attn.qkv_proj.weight", rows),
        same(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight", d),
        same(f"{ours}.mlp.gate_up.weight", f"{theirs}.mlp.gate_up_proj.weight", 2 * cfg.ffn),
        same(f"{ours}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", d),
    ]
