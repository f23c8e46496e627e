"""Gemma 2 in Hugging Face's spelling: config.json both ways; LLaMA's names of tensors, and two more norms. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.gemma2_config import Gemma2Config
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same

CONFIG = Gemma2Config
MODEL_TYPE = "gemma2"
ARCHITECTURE = "Gemma2ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED
GELU = "gelu_pytorch_tanh"


def read_config(values: Mapping[str, Any], where: str) -> Gemma2Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    found = read_common(fields, 8192, 256000, pattern=2)
    found |= {f"{x}_logit_softcapping": read_cap(fields, x, cap) for x, cap in (("attn", 50.0), ("final", 30.0))}
    fields.finish()
    return Gemma2Config(**found)


def read_common(fields: Fields, longest: int, vocab: int, pattern: int, theta: float = 10000.0) -> dict[str, Any]:
    """What both generations have."""
    fields.need("attention_bias", False)
    fields.need("use_bidirectional_attention", False)
    fields.need("hidden_activation", GELU)
    fields.seen.add("cache_implementation")  # how their generation keeps keys and values
    found = llama_hf.read_sizes(fields, kv_heads=4, head_dim=256, ffn=9216, layers=26, vocab=vocab, longest=longest,
                                width=2304, heads=8, theta=theta, activation=GELU, tied=True)  # fmt: skip
    # null means no window, absent means the library's default
    window = fields.values.get("sliding_window", fields.values.get("sliding_window_size", 4096)) or 0
    fields.seen |= {"sliding_window", "sliding_window_size"}
    return {
        **found,
        "sliding_window": window,
        "window_attn_skip_freq": read_pattern(fields, found["num_layers"], pattern),
        "query_pre_attn_scalar": fields.take("query_pre_attn_scalar", 256),
    }


def read_pattern(fields: Fields, layers: int, default: int) -> int:
    """Every how-manieth block attends to all positions; 0: none."""
    kinds = fields.take("layer_types", None)
    fields.seen |= {"sliding_window_pattern", "_sliding_window_pattern"}
    if kinds is None:
        return int(fields.take("sliding_window_pattern", default, "_sliding_window_pattern"))
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    if kinds != pattern_of(every, layers):
        fields.cases.append(f"layer_types is {kinds!r}, isotron has full_attention in every n-th of {layers} blocks")
    return every


def pattern_of(every: int, layers: int) -> list[str]:
    """`layer_types` of a pattern."""
    return ["sliding_attention" if not every or (i + 1) % every else "full_attention" for i in range(layers)]


def read_cap(fields: Fields, which: str, default: float) -> float:
    """A bound; null means none, absent means the library's default."""
    name = f"{which}_logit_softcapping"
    fields.seen.add(name)
    return float(fields.values.get(name, default) or 0.0)


def write_config(cfg: Gemma2Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return write_common(cfg) | {"attn_logit_softcapping": cfg.attn_logit_softcapping or None}


def write_common(cfg: Gemma2Config) -> dict[str, Any]:
    """The reverse of `read_common`, with the bound on logits."""
    return {
        **llama_hf.write_sizes(cfg),
        "attention_bias": False,
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": cfg.query_pre_attn_scalar or cfg.head_size,
        "sliding_window": cfg.sliding_window or None,
        "layer_types": pattern_of(cfg.window_attn_skip_freq, cfg.num_layers),
        "final_logit_softcapping": cfg.final_logit_softcapping or None,
    }


def tensors(cfg: Gemma2Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = llama_hf.ends(cfg)
    for i in range(cfg.num_layers):
        found += [*llama_hf.attention(cfg, i), *llama_hf.mlp(cfg, i), *norms(cfg, i)]
    return found


def norms(cfg: Gemma2Config, i: int) -> list[Mapped]:
    """The four norms of layer i."""
    theirs = {
        "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    return [same(f"layers.{i}.{a}.weight", f"model.layers.{i}.{b}.weight", cfg.hidden_size) for a, b in theirs.items()]
