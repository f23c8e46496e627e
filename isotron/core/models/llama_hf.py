"""LLaMA in Hugging Face's spelling: config.json both ways, and the names of tensors. PURE.

The functions that take sizes and names serve the families that are built like it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models.hf_fields import Fields, read_rope, write_rope, written_only_if
from isotron.core.models.hf_names import Mapped, same, stacked
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.llama_shapes import LlamaShapes

CONFIG = LlamaConfig
MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
PREFIX = "model."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IGNORED = ("*.rotary_emb.inv_freq",)


def read_config(values: Mapping[str, Any], where: str) -> LlamaConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    found = read_sizes(fields)
    found |= {name: fields.take(name, False) for name in ("attention_bias", "mlp_bias")}
    fields.finish()
    return LlamaConfig(**found)


def write_config(cfg: LlamaConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, softmax_type="vanilla")
    return {"attention_bias": cfg.attention_bias, "mlp_bias": cfg.mlp_bias, **write_sizes(cfg)}


def read_sizes(fields: Fields, kv_heads: int = 0, head_dim: int = 0, ffn: int = 11008, layers: int = 32,
               vocab: int = 32000, longest: int = 2048, epsilon: float = 1e-6, width: int = 4096,
               heads: int = 32, theta: float = 10000.0, activation: str = "silu",
               tied: bool = False) -> dict[str, Any]:  # fmt: skip
    """Sizes, rotation and ties; the keywords are the library's defaults for fields that a file leaves out."""
    fields.need("hidden_act", activation)
    d, h = fields.take("hidden_size", width), fields.take("num_attention_heads", heads)
    positions = fields.take("max_position_embeddings", longest)
    size = fields.take("head_dim", head_dim or d // h)
    if not fields.values.get("head_dim") and not head_dim and d % h:
        fields.cases.append(f"hidden_size {d} is not a multiple of {h} heads, and head_dim is not given")
    return {
        "num_layers": fields.take("num_hidden_layers", layers),
        "hidden_size": d,
        "num_attention_heads": h,
        "num_key_value_heads": fields.take("num_key_value_heads", kv_heads or h),
        "head_dim": 0 if size * h == d else size,
        "ffn_hidden_size": fields.take("intermediate_size", ffn),
        "vocab_size": fields.take("vocab_size", vocab),
        "max_position_embeddings": positions,
        "norm_epsilon": float(fields.take("rms_norm_eps", epsilon)),
        "tie_embeddings": fields.take("tie_word_embeddings", tied),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
        **read_rope(fields, positions, default_theta=theta),
    }


def write_sizes(cfg: LlamaShapes) -> dict[str, Any]:
    """The reverse of `read_sizes`."""
    return {
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_size,
        "intermediate_size": cfg.ffn,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "rms_norm_eps": cfg.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": cfg.attention_dropout,
        "initializer_range": cfg.init_method_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        **write_rope(cfg, cfg.max_position_embeddings),
    }


def tensors(cfg: LlamaConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    return [*plain(cfg), *(b for i in range(cfg.num_layers) for b in biases(cfg, i))]


def plain(cfg: LlamaShapes) -> list[Mapped]:
    """The tensors that every family with LLaMA's blocks has."""
    blocks = [m for i in range(cfg.num_layers) for m in (*attention(cfg, i), *mlp(cfg, i), *norms(cfg, i))]
    return [*ends(cfg), *blocks]


def ends(cfg: LlamaShapes) -> list[Mapped]:
    """Embedding, final norm, and the head where it is a tensor of its own."""
    v, d = cfg.vocab_size, cfg.hidden_size
    head = [] if cfg.tie_embeddings else [same("head.weight", HEAD, v)]
    return [same("embed.weight", EMBEDDING, v), same("norm.weight", "model.norm.weight", d), *head]


def qkv_rows(cfg: LlamaShapes) -> dict[str, int]:
    """Rows of the three projections."""
    n = cfg.head_size
    return {"q": cfg.num_attention_heads * n, "k": cfg.kv_heads * n, "v": cfg.kv_heads * n}


def attention(cfg: LlamaShapes, i: int) -> list[Mapped]:
    """Projections of layer i: three matrices of theirs are one of ours."""
    a, ours = f"model.layers.{i}.self_attn", f"layers.{i}.attention"
    parts = ((f"{a}.{x}_proj.weight", rows) for x, rows in qkv_rows(cfg).items())
    return [
        stacked(f"{ours}.qkv.weight", parts),
        same(f"{ours}.out.weight", f"{a}.o_proj.weight", cfg.hidden_size),
    ]


def mlp(cfg: LlamaShapes, i: int) -> list[Mapped]:
    """Gate and up of layer i are one matrix here."""
    m, ours = f"model.layers.{i}.mlp", f"layers.{i}.mlp"
    parts = [(f"{m}.{x}_proj.weight", cfg.ffn) for x in ("gate", "up")]
    return [
        stacked(f"{ours}.gate_up.weight", parts),
        same(f"{ours}.down.weight", f"{m}.down_proj.weight", cfg.hidden_size),
    ]


def norms(cfg: LlamaShapes, i: int) -> list[Mapped]:
    """The two gains of layer i."""
    theirs = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    d = cfg.hidden_size
    return [same(f"layers.{i}.{a}.weight", f"model.layers.{i}.{b}.weight", d) for a, b in theirs.items()]


def biases(cfg: LlamaConfig, i: int) -> list[Mapped]:
    """The biases of layer i, where the model has some."""
    ours, theirs, found = f"layers.{i}", f"model.layers.{i}", []
    if cfg.attention_bias:
        parts = [(f"{theirs}.self_attn.{x}_proj.bias", rows) for x, rows in qkv_rows(cfg).items()]
        found += [stacked(f"{ours}.attention.qkv.bias", parts),
                  same(f"{ours}.attention.out.bias", f"{theirs}.self_attn.o_proj.bias", cfg.hidden_size)]  # fmt: skip
    if cfg.mlp_bias:
        parts = [(f"{theirs}.mlp.{x}_proj.bias", cfg.ffn) for x in ("gate", "up")]
        found += [stacked(f"{ours}.mlp.gate_up.bias", parts),
                  same(f"{ours}.mlp.down.bias", f"{theirs}.mlp.down_proj.bias", cfg.hidden_size)]  # fmt: skip
    return found
