"""GPT-2 in Hugging Face's spelling: config.json both ways, names of tensors; theirs are transposed. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same

CONFIG = GPTConfig
MODEL_TYPE = "gpt2"
ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
IGNORED = ("*.attn.bias", "*.attn.masked_bias")  # causal masks, not the biases of layers
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}


def read_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("scale_attn_weights", True)
    fields.need("scale_attn_by_inverse_layer_idx", False)
    dropout = float(fields.take("resid_pdrop", 0.1))
    fields.need("embd_pdrop", dropout)
    d = fields.take("n_embd", 768, "hidden_size")
    config = GPTConfig(
        num_layers=fields.take("n_layer", 12, "num_hidden_layers"),
        hidden_size=d,
        num_attention_heads=fields.take("n_head", 12, "num_attention_heads"),
        ffn_hidden_size=fields.take("n_inner", 4 * d),
        vocab_size=fields.take("vocab_size", 50257),
        max_position_embeddings=fields.take("n_positions", 1024, "max_position_embeddings"),
        norm_epsilon=float(fields.take("layer_norm_epsilon", 1e-5)),
        activation=fields.choose("activation_function", "gelu_new", ACTIVATIONS),
        tie_embeddings=fields.take("tie_word_embeddings", True),
        hidden_dropout=dropout,
        attention_dropout=float(fields.take("attn_pdrop", 0.1)),
        init_method_std=float(fields.take("initializer_range", 0.02)),
    )
    fields.finish()
    return config


def write_config(cfg: GPTConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return {
        "n_layer": cfg.num_layers,
        "n_embd": cfg.hidden_size,
        "n_head": cfg.num_attention_heads,
        "n_inner": cfg.ffn if cfg.ffn != 4 * cfg.hidden_size else None,
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.max_position_embeddings,
        "n_ctx": cfg.max_position_embeddings,
        "layer_norm_epsilon": cfg.norm_epsilon,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[cfg.activation],
        "resid_pdrop": cfg.hidden_dropout,
        "embd_pdrop": cfg.hidden_dropout,
        "attn_pdrop": cfg.attention_dropout,
        "initializer_range": cfg.init_method_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": cfg.tie_embeddings,
    }


def tensors(cfg: GPTConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    v, d = cfg.vocab_size, cfg.hidden_size
    found = [
        same("embed.weight", EMBEDDING, v),
        same("positions.weight", "transformer.wpe.weight", cfg.max_position_embeddings),
    ]
    found += [same(f"norm.{kind}", f"transformer.ln_f.{kind}", d) for kind in ("weight", "bias")]
    found += [] if cfg.tie_embeddings else [same("head.weight", HEAD, v)]
    return [*found, *(m for i in range(cfg.num_layers) for m in _layer(cfg, i))]


def _layer(cfg: GPTConfig, i: int) -> list[Mapped]:
    theirs, ours, d = f"transformer.h.{i}", f"layers.{i}", cfg.hidden_size
    matrices = {
        "attention.qkv": ("attn.c_attn", 3 * d),
        "attention.out": ("attn.c_proj", d),
        "mlp.up": ("mlp.c_fc", cfg.ffn),
        "mlp.down": ("mlp.c_proj", d),
    }
    found = []
    for a, (b, rows) in matrices.items():
        found.append(same(f"{ours}.{a}.weight", f"{theirs}.{b}.weight", rows, transposed=True))
        found.append(same(f"{ours}.{a}.bias", f"{theirs}.{b}.bias", rows))
    for a, b in {"attention_norm": "ln_1", "mlp_norm": "ln_2"}.items():
        found += [same(f"{ours}.{a}.{kind}", f"{theirs}.{b}.{kind}", d) for kind in ("weight", "bias")]
    return found
