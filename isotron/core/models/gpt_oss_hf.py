"""GPT-OSS in Hugging Face's spelling: config.json both ways, names of tensors. PURE.

The matrices of all experts of a block are one tensor there, inputs x outputs, in which gate and up alternate. Published
files keep them in a form of 4 bits (MXFP4), which is refused: a copy in 16 bits is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import gemma2_hf, llama_hf
from isotron.core.models.gpt_oss_config import GptOssConfig
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped, alternating, entry, same, stacked
from isotron.core.models.moe_hf import PLAIN_ROUTER

CONFIG = GptOssConfig
MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED
# what their library means where a file says nothing
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}  # fmt: skip


def read_config(values: Mapping[str, Any], where: str) -> GptOssConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    angles = {} if values.get("rope_scaling") or values.get("rope_parameters") else {"rope_parameters": _YARN}
    fields = Fields({**values, **angles}, where)
    fields.need("attention_bias", True)
    fields.seen |= {"initial_context_length", "output_router_logits"}  # the rotation says the first, none the second
    found = llama_hf.read_sizes(fields, kv_heads=8, head_dim=64, ffn=2880, layers=36, vocab=201088, longest=131072,
                                epsilon=1e-5, width=2880, heads=64, theta=150000.0)  # fmt: skip
    found |= {
        "num_experts": fields.take("num_local_experts", 128, "num_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok", 4, "experts_per_token"),
        "moe_aux_loss_coeff": float(fields.take("router_aux_loss_coef", 0.001)),
        "swiglu_alpha": float(fields.take("swiglu_alpha", 1.702)),
        "swiglu_limit": float(fields.take("swiglu_limit", 7.0)),
        "softmax_type": "learnable",
    }
    window = values.get("sliding_window", 128) or 0  # null means no window, absent means the library's default
    fields.seen.add("sliding_window")
    found |= {
        "sliding_window": window,
        "window_attn_skip_freq": gemma2_hf.read_pattern(fields, found["num_layers"], 2),
    }
    fields.finish()
    return GptOssConfig(**found)


def write_config(cfg: GptOssConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, **PLAIN_ROUTER, moe_norm_topk_prob=True, moe_layer_freq="1",
                    moe_shared_expert_intermediate_size=0, softmax_type="learnable")  # fmt: skip
    return {
        "attention_bias": True,
        **llama_hf.write_sizes(cfg),
        "intermediate_size": cfg.expert_width,
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.moe_router_topk,
        "router_aux_loss_coef": cfg.moe_aux_loss_coeff,
        "output_router_logits": False,
        "swiglu_alpha": cfg.swiglu_alpha,
        "swiglu_limit": cfg.swiglu_limit,
        "sliding_window": cfg.sliding_window or None,
        "layer_types": gemma2_hf.pattern_of(cfg.window_attn_skip_freq, cfg.num_layers),
    }


def tensors(cfg: GptOssConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    found = llama_hf.ends(cfg)
    for i in range(cfg.num_layers):
        found += [*llama_hf.attention(cfg, i), *_attention(cfg, i), *llama_hf.norms(cfg, i), *_experts(cfg, i)]
    return found


def _attention(cfg: GptOssConfig, i: int) -> list[Mapped]:
    """Biases and sinks of layer i."""
    ours, theirs = f"layers.{i}.attention", f"model.layers.{i}.self_attn"
    parts = [(f"{theirs}.{x}_proj.bias", rows) for x, rows in llama_hf.qkv_rows(cfg).items()]
    return [
        stacked(f"{ours}.qkv.bias", parts),
        same(f"{ours}.out.bias", f"{theirs}.o_proj.bias", cfg.hidden_size),
        same(f"{ours}.sinks", f"{theirs}.sinks", cfg.num_attention_heads),
    ]


def _experts(cfg: GptOssConfig, i: int) -> list[Mapped]:
    """Router and experts of layer i."""
    ours, theirs, e = f"layers.{i}.mlp", f"model.layers.{i}.mlp", range(cfg.num_experts)
    up = [(f"{theirs}.experts.gate_up_proj{end}", 2 * cfg.expert_width) for end in ("", "_bias")]
    down = [(f"{theirs}.experts.down_proj{end}", cfg.hidden_size) for end in ("", "_bias")]
    found = [same(f"{ours}.router.{x}", f"{theirs}.router.{x}", cfg.num_experts) for x in ("weight", "bias")]
    for (name, rows), kind in zip(up, ("weight", "bias"), strict=True):
        every = ((entry(name, j), rows) for j in e)
        found.append(alternating(f"{ours}.experts.gate_up.{kind}", every, 2, transposed=kind == "weight"))
    for (name, rows), kind in zip(down, ("weight", "bias"), strict=True):
        every = ((entry(name, j), rows) for j in e)
        found.append(stacked(f"{ours}.experts.down.{kind}", every, transposed=kind == "weight"))
    return found
