"""Reading and writing a Hugging Face config.json field by field, so that none is dropped unseen. PURE.

A family takes the fields it knows, states those that must have one value, and `finish` reports everything else that
could change what the weights compute, all at once. Fields in NEUTRAL never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.errors import Problem, Refused

NEUTRAL = frozenset(
    """
    _name_or_path _attn_implementation_autoset _attn_implementation attn_implementation architectures auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id torch_dtype dtype
    transformers_version use_cache model_type tokenizer_class task_specific_params id2label label2id num_labels
    problem_type finetuning_task output_attentions output_hidden_states return_dict return_dict_in_generate torchscript
    pruned_heads chunk_size_feed_forward use_bfloat16 prefix suppress_tokens begin_suppress_tokens tf_legacy_loss
    pretraining_tp max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty classifier_dropout
    classifier_dropout_prob summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout reorder_and_upcast_attn n_ctx is_decoder unsloth_version unsloth_fixed base_model_tp_plan
    base_model_pp_plan _commit_hash language
    """.split()  # noqa: SIM905  a list of words reads better as text
)
# whole numbers from 1 on, under whatever name a family has them
SIZES = frozenset(
    """
    hidden_size n_embd d_model num_hidden_layers n_layer num_layers num_decoder_layers num_attention_heads n_head
    num_heads num_key_value_heads head_dim d_kv intermediate_size n_inner d_ff vocab_size max_position_embeddings
    n_positions moe_intermediate_size n_routed_experts num_local_experts num_experts num_experts_per_tok
    experts_per_token kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim relative_attention_num_buckets
    type_vocab_size
    """.split()  # noqa: SIM905
)
LARGEST = 10**9  # beyond it a typing error would fill the machine before anything else could be said
MUST_BE_OFF = ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "quantization_config")


class Fields:
    """The fields of one config.json as a family consumes them."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.seen: set[str] = set()
        self.cases: list[str] = []

    def take(self, name: str, default: Any, *others: str) -> Any:
        """The value of a field under the first of its names that is there and not null; the default for a size that
        is none, which `finish` refuses.
        """
        self.seen.update((name, *others))
        key = next((k for k in (name, *others) if self.values.get(k) is not None), None)
        if key is None:
            return default
        value = self.values[key]
        if key in SIZES and (type(value) is not int or not 0 < value <= LARGEST):
            self.cases.append(f"{key} is {value!r}, a size is a whole number from 1 to {LARGEST}")
            return default
        return value

    def need(self, name: str, *legal: Any) -> None:
        """A field that must have one of these values when it is there and not null."""
        self.seen.add(name)
        value = self.values.get(name)
        if value is not None and value not in legal:
            self.cases.append(f"{name} is {value!r}, isotron has {' or '.join(map(repr, legal))}")

    def choose(self, name: str, default: str, known: Mapping[str, str]) -> str:
        """A field whose values have other names here."""
        value = self.take(name, default)
        if value not in known:
            self.cases.append(f"{name} is {value!r}, isotron has {', '.join(known)}")
            return next(iter(known.values()))
        return known[value]

    def finish(self, encoder_decoder: bool = False) -> None:
        """Refuse what is not understood: one message that lists everything."""
        for name in MUST_BE_OFF[encoder_decoder:]:
            self.need(name, False, None)
        left = [k for k in self.values if k not in self.seen and k not in NEUTRAL]
        unknown = {k: self.values[k] for k in left if self.values[k] not in (None, False, {}, [], "")}
        cases = self.cases + [f"{k} = {v!r} is not known" for k, v in sorted(unknown.items())]
        if cases:
            fix = "a model without these features; a field that changes nothing can be taken out of config.json"
            raise Refused([Problem(self.where, "; ".join(cases), fix)])


def written_only_if(cfg: Any, model_type: str, **values: Any) -> None:
    """Refuse to write a config whose fields say what this `model_type` cannot; `values` are those that it means."""
    cases = [f"{k} is {getattr(cfg, k)!r}, {model_type} means {v!r}" for k, v in values.items() if getattr(cfg, k) != v]
    if cases:
        fix = "--to isotron, or another family: the weights would compute something else there"
        raise Refused([Problem(f"a model of family {cfg.family} as {model_type}", "; ".join(cases), fix)])


# ---- rotary positions ----------------------------------------------------------------------------------------------

# their key -> (our field, kinds of scaling that have it)
_KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "factor": ("rope_factor", ("linear", "dynamic", "llama3", "yarn", "longrope")),
    "original_max_position_embeddings": (
        "rope_original_positions",
        ("linear", "dynamic", "llama3", "yarn", "longrope"),
    ),
    "low_freq_factor": ("rope_low_freq_factor", ("llama3",)),
    "high_freq_factor": ("rope_high_freq_factor", ("llama3",)),
    "beta_fast": ("rope_beta_fast", ("yarn",)),
    "beta_slow": ("rope_beta_slow", ("yarn",)),
    "truncate": ("rope_truncate", ("yarn",)),
    "mscale": ("rope_mscale", ("yarn",)),
    "mscale_all_dim": ("rope_mscale_all_dim", ("yarn",)),
    "attention_factor": ("rope_attention_factor", ("yarn", "longrope")),
    "short_factor": ("rope_short_factor", ("longrope",)),
    "long_factor": ("rope_long_factor", ("longrope",)),
}
_TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
# what must be written even when it has our default, because readers have none
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def read_rope(fields: Fields, longest: int, theta: str = "rope_theta", percent: str = "partial_rotary_factor",
              default_percent: float = 1.0, default_theta: float = 10000.0) -> dict[str, Any]:  # fmt: skip
    """Our rotary fields, from rope_scaling (older), rope_parameters (newer) and the fields beside them."""
    old, new = fields.take("rope_scaling", {}), fields.take("rope_parameters", {})
    given = {**new, **old}
    first = fields.take("original_max_position_embeddings", None)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _TYPES or any(isinstance(v, Mapping) for v in given.values()):
        fields.cases.append(f"rotary positions of type {kind!r} with {sorted(given)} are not known")
        kind = "default"
    found: dict[str, Any] = {"rope_scaling": _TYPES[kind]}
    found["rope_theta"] = float(
        agreed(fields, "rope_theta", given, fields.take(theta, None, "rope_theta"), default_theta)
    )
    found["rope_percent"] = float(
        agreed(
            fields, "partial_rotary_factor", given, fields.take(percent, None, "partial_rotary_factor"), default_percent
        )
    )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    for key, (ours, kinds) in _KEYS.items():
        if _TYPES[kind] in kinds:
            known.add(key)
            if given.get(key) is not None:
                found[ours] = tuple(map(float, given[key])) if isinstance(given[key], list) else given[key]
    strange = sorted(k for k, v in given.items() if k not in known and v is not None)
    if strange and kind != "default":
        fields.cases.append(f"rotary positions of type {kind} have no {', '.join(strange)}")
    if first is not None and _TYPES[kind] in ("llama3", "yarn", "longrope"):
        found["rope_original_positions"] = first
    if "rope_factor" not in found and _TYPES[kind] in ("yarn", "longrope"):
        stretch = longest / (found.get("rope_original_positions") or longest)
        found["rope_factor"] = 0.0 if _TYPES[kind] == "longrope" else stretch
    for ours in ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow",
                 "rope_mscale", "rope_mscale_all_dim", "rope_attention_factor"):  # fmt: skip
        if ours in found:
            found[ours] = float(found[ours])
    return found


def agreed(fields: Fields, key: str, given: Mapping[str, Any], beside: Any, default: Any) -> Any:
    """A value that may stand in two places; two values that differ are refused."""
    inside = given.get(key)
    if inside is not None and beside is not None and inside != beside:
        fields.cases.append(f"{key} is {beside!r} beside the rotary parameters and {inside!r} in them")
    return next(v for v in (inside, beside, default) if v is not None)


def write_rope(cfg: Any, longest: int) -> dict[str, Any]:
    """Both spellings: rope_theta with rope_scaling for older libraries, rope_parameters for newer ones."""
    theta = {"rope_theta": cfg.rope_theta}
    part = {"partial_rotary_factor": cfg.rope_percent} if cfg.rope_percent != 1.0 else {}
    if cfg.rope_scaling == "none":
        return {**theta, **part, "rope_scaling": None, "rope_parameters": {"rope_type": "default", **theta, **part}}
    default, scaling = type(cfg)(), {}
    for key, (ours, kinds) in _KEYS.items():
        value = getattr(cfg, ours)
        if key == "original_max_position_embeddings" and key in _REQUIRED[cfg.rope_scaling]:
            value = value or longest
        written = key in ("factor", *_REQUIRED[cfg.rope_scaling]) or value != getattr(default, ours)
        if cfg.rope_scaling in kinds and written and (key != "factor" or value):
            scaling[key] = list(value) if isinstance(value, tuple) else value
    old = {"type": cfg.rope_scaling, "rope_type": cfg.rope_scaling, **scaling}
    new = {"rope_type": cfg.rope_scaling, **scaling, **theta, **part}
    return {**theta, **part, "rope_scaling": old, "rope_parameters": new}
