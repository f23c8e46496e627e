"""What DeepSeek's families share in Hugging Face's spelling: fields of config.json, names of latent attention. PURE."""

from __future__ import annotations

from typing import Any

from isotron.core.models import llama_hf, moe_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same, with_pairs
from isotron.core.nn.moe_config import pattern_text


def read_dense_first(fields: Fields, layers: int, default: int) -> dict[str, Any]:
    """Blocks with an MLP at the beginning, then blocks with experts."""
    fields.need("moe_layer_freq", 1)
    first = min(fields.take("first_k_dense_replace", default), layers)
    return {"moe_layer_freq": pattern_text([i >= first for i in range(layers)])}


def write_dense_first(cfg: Any) -> dict[str, Any]:
    """The reverse of `read_dense_first`."""
    return {"first_k_dense_replace": cfg.num_layers - len(cfg.moe_layers), "moe_layer_freq": 1}


def read_shared(fields: Fields, width: int, default: int) -> dict[str, Any]:
    """What every token visits, as so many experts' width."""
    return {"moe_shared_expert_intermediate_size": fields.take("n_shared_experts", default) * width}


def read_latent(fields: Fields, heads: int) -> dict[str, Any]:
    """Widths of latent attention; the head width of the config is its rotated part."""
    fields.need("attention_bias", False)
    fields.need("num_key_value_heads", heads)
    rotated = fields.take("qk_rope_head_dim", 64)
    plain = fields.take("qk_nope_head_dim", 128)
    fields.need("head_dim", rotated, plain + rotated)
    fields.need("qk_head_dim", plain + rotated)
    fields.need("rope_interleave", True)
    absent = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    return {
        "q_lora_rank": 0 if absent else fields.take("q_lora_rank", 1536),
        "kv_lora_rank": fields.take("kv_lora_rank", 512),
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": fields.take("v_head_dim", 128),
        "head_dim": 0,
        "num_key_value_heads": heads,
    }


def write_latent(cfg: Any) -> dict[str, Any]:
    """The reverse of `read_latent`, and sizes."""
    return {
        **llama_hf.write_sizes(cfg),
        "attention_bias": False,
        "head_dim": cfg.qk_pos_emb_head_dim,
        "q_lora_rank": cfg.q_lora_rank or None,
        "kv_lora_rank": cfg.kv_lora_rank,
        "qk_nope_head_dim": cfg.qk_head_dim,
        "qk_rope_head_dim": cfg.qk_pos_emb_head_dim,
        "v_head_dim": cfg.v_head_dim,
    }


def latent(cfg: Any, ours: str, theirs: str) -> list[Mapped]:
    """Projections of latent attention; rotated rows are neighbouring pairs there and halves here."""
    h, p = cfg.num_attention_heads, cfg.qk_pos_emb_head_dim
    up = "q_b_proj" if cfg.q_lora_rank else "q_proj"
    query = [
        same(f"{ours}.q_down.weight", f"{theirs}.q_a_proj.weight", cfg.q_lora_rank),
        same(f"{ours}.q_norm.weight", f"{theirs}.q_a_layernorm.weight", cfg.q_lora_rank),
    ]
    return [
        *(query if cfg.q_lora_rank else ()),
        with_pairs(f"{ours}.q_up.weight", f"{theirs}.{up}.weight", h, cfg.qk_head_dim, p),
        with_pairs(f"{ours}.kv_down.weight", f"{theirs}.kv_a_proj_with_mqa.weight", 1, cfg.kv_lora_rank, p),
        same(f"{ours}.kv_norm.weight", f"{theirs}.kv_a_layernorm.weight", cfg.kv_lora_rank),
        same(f"{ours}.kv_up.weight", f"{theirs}.kv_b_proj.weight", h * (cfg.qk_head_dim + cfg.v_head_dim)),
        same(f"{ours}.out.weight", f"{theirs}.o_proj.weight", cfg.hidden_size),
    ]


def tensors(cfg: Any) -> list[Mapped]:
    """Every tensor of a model with latent attention, ours and theirs."""
    found = llama_hf.ends(cfg)
    for i in range(cfg.num_layers):
        found += latent(cfg, f"layers.{i}.attention", f"model.layers.{i}.self_attn")
        found += [*moe_hf.mlp(cfg, i, "shared_experts"), *llama_hf.norms(cfg, i)]
    return found
