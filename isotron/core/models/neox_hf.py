"""GPT-NeoX in Hugging Face's spelling: config.json both ways; their q, k and v are interleaved head by head. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models.gpt_hf import ACTIVATIONS
from isotron.core.models.hf_fields import Fields, read_rope, write_rope
from isotron.core.models.hf_names import Mapped, interleaved, same
from isotron.core.models.neox_config import NeoXConfig

CONFIG = NeoXConfig
MODEL_TYPE = "gpt_neox"
ARCHITECTURE = "GPTNeoXForCausalLM"
PREFIX = "gpt_neox."
HEAD, EMBEDDING = "embed_out.weight", "gpt_neox.embed_in.weight"
IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def read_config(values: Mapping[str, Any], where: str) -> NeoXConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("attention_bias", True)
    longest = fields.take("max_position_embeddings", 2048)
    rope = read_rope(fields, longest, "rotary_emb_base", "rotary_pct", 0.25)
    config = NeoXConfig(
        num_layers=fields.take("num_hidden_layers", 44),
        hidden_size=fields.take("hidden_size", 6144),
        num_attention_heads=fields.take("num_attention_heads", 64),
        ffn_hidden_size=fields.take("intermediate_size", 24576),
        vocab_size=fields.take("vocab_size", 50432),
        max_position_embeddings=longest,
        norm_epsilon=float(fields.take("layer_norm_eps", 1e-5)),
        activation=fields.choose("hidden_act", "gelu", ACTIVATIONS),
        parallel_residual=fields.take("use_parallel_residual", True),
        tie_embeddings=fields.take("tie_word_embeddings", False),
        hidden_dropout=float(fields.take("hidden_dropout", 0.0)),
        attention_dropout=float(fields.take("attention_dropout", 0.0)),
        init_method_std=float(fields.take("initializer_range", 0.02)),
        **rope,
    )
    fields.finish()
    return config


def write_config(cfg: NeoXConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    rope = write_rope(cfg, cfg.max_position_embeddings)
    return {
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_attention_heads,
        "intermediate_size": cfg.ffn,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "layer_norm_eps": cfg.norm_epsilon,
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_fast"}[cfg.activation],
        "use_parallel_residual": cfg.parallel_residual,
        "attention_bias": True,
        "hidden_dropout": cfg.hidden_dropout,
        "attention_dropout": cfg.attention_dropout,
        "initializer_range": cfg.init_method_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rotary_emb_base": cfg.rope_theta,
        "rotary_pct": cfg.rope_percent,
        "rope_scaling": rope["rope_scaling"],
        "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": cfg.rope_percent},
    }


def tensors(cfg: NeoXConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    v, d = cfg.vocab_size, cfg.hidden_size
    found = [same("embed.weight", EMBEDDING, v)]
    found += [same(f"norm.{kind}", f"gpt_neox.final_layer_norm.{kind}", d) for kind in ("weight", "bias")]
    found += [] if cfg.tie_embeddings else [same("head.weight", HEAD, v)]
    return [*found, *(m for i in range(cfg.num_layers) for m in _layer(cfg, i))]


def _layer(cfg: NeoXConfig, i: int) -> list[Mapped]:
    theirs, ours, d, n = f"gpt_neox.layers.{i}", f"layers.{i}", cfg.hidden_size, cfg.head_size
    found = []
    rest = {
        "attention.out": ("attention.dense", d),
        "mlp.up": ("mlp.dense_h_to_4h", cfg.ffn),
        "mlp.down": ("mlp.dense_4h_to_h", d),
        "attention_norm": ("input_layernorm", d),
        "mlp_norm": ("post_attention_layernorm", d),
    }
    for kind in ("weight", "bias"):
        qkv = f"{theirs}.attention.query_key_value.{kind}"
        found.append(interleaved(f"{ours}.attention.qkv.{kind}", qkv, cfg.num_attention_heads, (n, n, n)))
        found += [same(f"{ours}.{a}.{kind}", f"{theirs}.{b}.{kind}", rows) for a, (b, rows) in rest.items()]
    return found
