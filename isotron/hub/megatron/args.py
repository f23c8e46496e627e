"""Model configs and Megatron's arguments, as its checkpoints keep them, both ways. PURE.

Reading refuses every argument that changes what the weights compute and that has no counterpart here; writing refuses
every property of a model that Megatron's GPT has no argument for. All at once, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.errors import Problem, Refused, refuse
from isotron.hub.families import spelling_of

# argument -> the values under which our models compute the same
SAME: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0), "multi_latent_attention": (None, False), "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False), "squared_relu": (None, False), "onnx_safe": (None, False),
    "apply_residual_connection_post_layernorm": (None, False), "rotary_interleaved": (None, False),
    "attention_output_gate": (None, False), "mtp_num_layers": (None, 0), "heterogeneous_layers_config_path": (None,),
    "window_attn_skip_freq": (None,), "softmax_type": (None, "vanilla"), "qk_clip": (None, False), "qk_l2_norm": (None,
    False), "is_hybrid_model": (None, False), "hybrid_override_pattern": (None,), "embedding_init_method_std": (None,),
    "scale_embedding": (None, False), "no_rope_freq": (None,), "quick_geglu": (None, False), "bert_binary_head": (None,
    False, True), "moe_layer_freq": (None, 1), "experimental_attention_variant": (None,),
}  # fmt: skip


class Given:
    """The arguments of a run as they are asked for, with everything that is wrong about them."""

    def __init__(self, args: Mapping[str, Any], where: str) -> None:
        self.args, self.where, self.cases = args, where, list[str]()

    def take(self, name: str, default: Any = None, *others: str) -> Any:
        """An argument under the first of its names that is there and not None."""
        return next((self.args[k] for k in (name, *others) if self.args.get(k) is not None), default)

    def finish(self) -> None:
        """Refuse what is not understood."""
        for name, values in SAME.items():
            if name in self.args and self.args[name] not in values:
                self.cases.append(f"{name} is {self.args[name]!r}, isotron has {values[-1]!r}")
        if self.cases:
            raise Refused([Problem(self.where, "; ".join(self.cases), "a GPT or LLaMA model without these features")])


def read_config(args: Mapping[str, Any], where: str) -> Any:
    """The model config of a checkpoint's arguments."""
    if not args:
        case = "common.pt keeps no arguments of the run, so sizes and heads are not known"
        raise refuse(where, case, "a checkpoint written by Megatron-LM's training script, or by isotron convert")
    given = Given(args, where)
    kind = given.take("position_embedding_type", "learned_absolute")
    if given.take("use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in ("learned_absolute", "rope"):
        given.cases.append(f"position_embedding_type is {kind!r}, isotron has learned_absolute and rope")
    family = _family(given, kind)
    found = {**_sizes(given, family), **(_rope(given) if kind == "rope" else {})}
    given.finish()
    config: Any = spelling_of(family).CONFIG(**found)
    return config


def _family(given: Given, kind: str) -> str:
    """Which family has these blocks."""
    gated, rms = bool(given.take("swiglu")), given.take("normalization", "LayerNorm") == "RMSNorm"
    biased = bool(given.take("add_bias_linear", True))
    grouped = bool(given.take("group_query_attention"))
    if gated and rms and biased and kind == "rope" and not given.take("qk_layernorm") and not given.take("window_size"):
        return "llama"
    if gated and rms and not biased and kind == "rope":
        if given.take("qk_layernorm"):
            if given.take("add_qkv_bias"):
                given.cases.append("qk_layernorm and add_qkv_bias together are in no family")
            return "qwen3"
        if given.take("add_qkv_bias"):
            return "qwen2"
        return "mistral" if given.take("window_size") else "llama"
    if not gated and not rms and biased and not grouped and not given.take("qk_layernorm"):
        return "gpt" if kind == "learned_absolute" else "neox"
    given.cases.append(
        f"swiglu {gated}, normalization {'RMSNorm' if rms else 'LayerNorm'}, add_bias_linear {biased} and "
        f"group_query_attention {grouped} are the blocks of no family here"
    )
    return "llama" if kind == "rope" else "gpt"


def _sizes(given: Given, family: str) -> dict[str, Any]:
    heads, width = given.take("num_attention_heads", 0), given.take("hidden_size", 0)
    head_size = given.take("kv_channels") or (width // heads if heads else 0)
    found = {
        "num_layers": given.take("num_layers", 0),
        "hidden_size": width,
        "num_attention_heads": heads,
        "ffn_hidden_size": given.take("ffn_hidden_size", 0),
        "vocab_size": given.take("vocab_size") or given.take("padded_vocab_size", 0),
        "max_position_embeddings": given.take("max_position_embeddings", 0) or given.take("seq_length", 0),
        "norm_epsilon": float(given.take("norm_epsilon", 1e-5, "layernorm_epsilon")),
        "tie_embeddings": not given.take("untie_embeddings_and_output_weights", False),
        "hidden_dropout": float(given.take("hidden_dropout", 0.1)),
        "attention_dropout": float(given.take("attention_dropout", 0.1)),
        "init_method_std": float(given.take("init_method_std", 0.02)),
    }
    if family in ("gpt", "neox"):
        # the fused kernel of Megatron is the approximation
        fused = given.take("bias_gelu_fusion", True) or given.take("openai_gelu", False)
        found["activation"] = "gelu_tanh" if fused else "gelu"
        if heads and head_size * heads != width:
            given.cases.append(f"kv_channels is {head_size}, heads of this family have {width // heads}")
        if family == "neox":
            found["parallel_residual"] = False
        return found
    found["head_dim"] = 0 if head_size * heads == width else head_size
    found["num_key_value_heads"] = given.take("num_query_groups", heads) if given.take("group_query_attention") else 0
    if family == "llama":
        found |= dict.fromkeys(("attention_bias", "mlp_bias"), bool(given.take("add_bias_linear", True)))
    window = given.take("window_size")
    if window and family != "llama":
        found["sliding_window"] = int(window[0]) + 1
    return found


def _rope(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_theta": float(given.take("rotary_base", 10000.0)),
        "rope_percent": float(given.take("rotary_percent", 1.0)),
    }
    stretch = given.take("rotary_seq_len_interpolation_factor")
    if given.take("use_rope_scaling"):
        found |= {"rope_scaling": "llama3", "rope_factor": float(given.take("rope_scaling_factor", 8.0)),
                  "rope_original_positions": 8192}  # fmt: skip
    elif stretch not in (None, 1):
        found |= {"rope_scaling": "linear", "rope_factor": float(stretch)}
    return found


# ---- the way back --------------------------------------------------------------------------------------------------


def padded_vocabulary(vocab: int, tp: int, multiple: int = 128) -> int:
    """The rows that Megatron holds for a vocabulary under tensor parallelism of `tp`."""
    step = multiple * tp
    return -(-vocab // step) * step


def write_args(cfg: Any, dtype: str, tp: int, pp: int) -> dict[str, Any]:
    """The arguments that a Megatron run with this model has; refuses what Megatron's GPT has not."""
    gated = cfg.family not in ("gpt", "neox")
    biased = not gated or getattr(cfg, "mlp_bias", False)
    refuse_unknown(cfg)
    window = getattr(cfg, "sliding_window", 0)
    found = {
        "num_layers": cfg.num_layers, "hidden_size": cfg.hidden_size, "num_attention_heads": cfg.num_attention_heads,
        "kv_channels": cfg.head_size, "ffn_hidden_size": cfg.ffn, "seq_length": cfg.max_position_embeddings,
        "max_position_embeddings": cfg.max_position_embeddings, "norm_epsilon": cfg.norm_epsilon,
        "group_query_attention": cfg.kv_heads != cfg.num_attention_heads, "num_query_groups": cfg.kv_heads,
        "vocab_size": cfg.vocab_size, "padded_vocab_size": padded_vocabulary(cfg.vocab_size, tp),
        "make_vocab_size_divisible_by": 128, "untie_embeddings_and_output_weights": not cfg.tie_embeddings,
        "hidden_dropout": cfg.hidden_dropout, "attention_dropout": cfg.attention_dropout,
        "init_method_std": cfg.init_method_std, "swiglu": gated, "add_bias_linear": biased,
        "add_qkv_bias": biased or cfg.family == "qwen2", "qk_layernorm": cfg.family == "qwen3",
        "normalization": "RMSNorm" if gated else "LayerNorm", "window_size": [window - 1, 0] if window else None,
        "bias_gelu_fusion": not gated and cfg.activation == "gelu_tanh", "openai_gelu": False,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": 1,
        "num_experts": None, "apply_layernorm_1p": False, "fp16": dtype == "float16", "bf16": dtype == "bfloat16",
        "iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0, **_write_rope(cfg),
    }  # fmt: skip
    return found


def _write_rope(cfg: Any) -> dict[str, Any]:
    if cfg.family == "gpt":
        return {
            "position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": False,
            "rotary_base": 10000, "rotary_percent": 1.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0,
            "rotary_seq_len_interpolation_factor": None,
        }  # fmt: skip
    linear, llama3 = cfg.rope_scaling == "linear", cfg.rope_scaling == "llama3"
    return {
        "position_embedding_type": "rope", "use_rotary_position_embeddings": True, "rotary_base": cfg.rope_theta,
        "rotary_percent": cfg.rope_percent, "rotary_interleaved": False, "use_rope_scaling": llama3,
        "rope_scaling_factor": cfg.rope_factor,
        "rotary_seq_len_interpolation_factor": cfg.rope_factor if linear else None,
    }  # fmt: skip


def refuse_unknown(cfg: Any) -> None:
    """What Megatron's GPT cannot be told."""
    cases = []
    if cfg.family not in ("gpt", "llama", "mistral", "qwen2", "qwen3", "phi3", "neox"):
        cases.append(f"the family {cfg.family} has blocks that the GPT of Megatron's format has not")
    if getattr(cfg, "attention_bias", False) != getattr(cfg, "mlp_bias", False):
        cases.append("biases in attention or in the MLP alone (attention_bias, mlp_bias)")
    if getattr(cfg, "parallel_residual", False):
        cases.append("attention and MLP side by side (parallel_residual)")
    if getattr(cfg, "first_window_layer", 0) and getattr(cfg, "sliding_window", 0):
        cases.append("a window in some layers only (first_window_layer)")
    scaling = getattr(cfg, "rope_scaling", "none")
    if scaling not in ("none", "linear", "llama3"):
        cases.append(f"rotary positions stretched by {scaling}")
    if scaling == "llama3":
        given = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor, cfg.rope_original_positions
        if given != (1.0, 4.0, 8192):
            cases.append(f"llama3 positions with {given} where Megatron has (1.0, 4.0, 8192) fixed")
    if cases:
        asked, fix = f"a model of the family {cfg.family} in Megatron's format", "--to hf or --to isotron"
        raise Refused([Problem(asked, "Megatron has no argument for: " + "; ".join(cases), fix)])
