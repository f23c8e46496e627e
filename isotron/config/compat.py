"""Megatron spellings: what each of its options means here. PURE.

Four tables: other names of our options (here and in `switches`), options that have no meaning here with the reason,
and options that could change numbers or memory and are refused with what to use instead. Anything not in a table is an
unknown option; nothing that changes numbers or memory is ever accepted without effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from isotron.config import compat_ignored, compat_refused, data_files
from isotron.core.errors import Problem

ALIASES: dict[str, str] = {
    "--tensor-model-parallel-size": "tp",
    "--tensor-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--pipeline-parallel-size": "pp",
    "--data-parallel-size": "dp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--hierarchical-context-parallel-sizes": "hierarchical_cp_sizes",
    "--virtual-pipeline-stages": "vpp",
    "--virtual-pipeline-model-parallel-size": "vpp",
    "--num-virtual-stages-per-pipeline-rank": "vpp",
    "--pipeline-model-parallel-layout": "pipeline_layout",
    "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group",
    "--num-microbatches-with-partial-activation-checkpoints": "recompute_keep",
    "--zero-stage": "zero",
    "--muon-num-ns-steps": "muon_ns_steps",
    "--muon-scalar-optimizer": "muon_others",
    "--save-checkpoint": "save",
    "--load-checkpoint": "load",
    "--non-persistent-local-ckpt-dir": "local_save",
    "--non-persistent-save-interval": "local_save_interval",
    "--replication-jump": "local_save_ranks",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--rotary-base": "rope_theta",
    "--rope-scaling-factor": "rope_factor",
    "--rotary-percent": "rope_percent",
    "--layernorm-epsilon": "norm_epsilon",
    "--merges-file": "merge_file",
    "--encoder-seq-length": "seq_length",
    "--num-tokens-to-generate": "max_new_tokens",
    "--prompts": "prompt",
    "--top_k": "top_k",
    "--top_p": "top_p",
}
# (leaf, value as Megatron spells it) -> value here. Megatron's adam has decoupled weight decay, which is AdamW.
VALUE_ALIASES: dict[tuple[str, str], str] = {
    ("optimizer", "adam"): "adamw",
    ("tokenizer_type", "Llama2Tokenizer"): "SentencePieceTokenizer",
    ("tokenizer_type", "GPTSentencePieceTokenizer"): "SentencePieceTokenizer",
    ("tokenizer_type", "SFTTokenizer"): "HuggingFaceTokenizer",
    ("moe_router_load_balancing_type", "seq_aux_loss"): "sequence",
    ("moe_router_load_balancing_type", "aux_loss"): "batch",
    ("moe_router_load_balancing_type", "global_aux_loss"): "global",
    ("optimizer", "dist_muon"): "muon",
    ("muon_others", "adam"): "adamw",
    ("main_grads_dtype", "fp32"): "auto",
    ("main_grads_dtype", "bf16"): "bfloat16",
    ("exp_avg_dtype", "fp32"): "float32",
    ("exp_avg_dtype", "bf16"): "bfloat16",
    ("exp_avg_sq_dtype", "fp32"): "float32",
    ("exp_avg_sq_dtype", "bf16"): "bfloat16",
}

# Leaves that begin with @ are resolved once the whole config is known: `switches` (model family), `settle` (the rest).
SETS: dict[str, dict[str, Any]] = {
    "--bf16": {"dtype": "bfloat16"},
    "--fp16": {"dtype": "float16"},
    "--use-distributed-optimizer": {"zero": 1},
    "--use-torch-fsdp2": {"zero": 3},
    "--grad-reduce-in-bf16": {"grad_reduce_dtype": "bfloat16"},
    "--accumulate-allreduce-grads-in-fp32": {"main_grads_dtype": "auto"},
    "--recompute-activations": {"recompute": "selective"},
    "--checkpoint-activations": {"recompute": "full"},
    "--openai-gelu": {"activation": "gelu_tanh"},
    "--untie-embeddings-and-output-weights": {"tie_embeddings": False},
    "--swiglu": {"@mlp": "swiglu"},
    "--disable-bias-linear": {"@bias": "off"},
    "--use-rotary-position-embeddings": {"@positions": "rope"},
    "--moe-router-pre-softmax": {"moe_norm_topk_prob": False},
    "--log-straggler": {"straggler_interval": 100},
    "--check-for-spiky-loss": {"spike_factor": 10.0},
    "--group-query-attention": {"@grouped": True},
    "--dataloader-inter-document-masking": {"reset_attention_mask": True},
    "--use-rope-scaling": {"rope_scaling": "llama3", "rope_original_positions": 8192},
}
CHOICES: dict[str, dict[str, dict[str, Any] | Problem]] = {
    "--data-parallel-sharding-strategy": {
        "no_shard": {"zero": 0},
        "optim": {"zero": 1},
        "optim_grads": {"zero": 2},
        "optim_grads_params": {"zero": 3},
    },
    "--recompute-granularity": {"full": {"recompute": "full"}, "selective": {"recompute": "selective"}},
    "--rerun-mode": {
        "disabled": {"rerun": False},
        "validate_results": {"rerun": True},
        "report_stats": Problem("--rerun-mode report_stats", "steps are run again when suspect", "--rerun"),
    },
    "--normalization": {"LayerNorm": {"@norm": "LayerNorm"}, "RMSNorm": {"@norm": "RMSNorm"}},
    "--position-embedding-type": {
        "learned_absolute": {"@positions": "learned_absolute"},
        "rope": {"@positions": "rope"},
        "relative": {"@positions": "relative"},
    },
    "--dataloader-type": {
        "single": {},
        "cyclic": Problem(
            "--dataloader-type cyclic",
            "samples are always read in the order of Megatron's single loader, so that a resumed run continues it",
            "--dataloader-type single",
        ),
        "external": Problem(
            "--dataloader-type external",
            "a loop with a loader of its own is written on isotron.core (examples/core_loop.py)",
            "--dataloader-type single",
        ),
    },
}
# Whole numbers that depend on other options; -> leaf that `settle` fills.
LATE: dict[str, str] = {
    "--train-samples": "@train_samples",
    "--lr-warmup-samples": "@lr_warmup_samples",
    "--lr-decay-samples": "@lr_decay_samples",
    "--lr-wsd-decay-samples": "@lr_wsd_decay_samples",
    "--num-layers-per-virtual-pipeline-stage": "@layers_per_chunk",
    "--decoder-first-pipeline-num-layers": "@first_rank_layers",
    "--decoder-last-pipeline-num-layers": "@last_rank_layers",
}


@dataclass(frozen=True)
class Foreign:
    """One option of Megatron: how many words it takes (-1: all up to the next option) and what they come to.

    `read(flag, words)` gives leaves, a note (accepted without effect) or a problem.
    """

    words: int
    read: Callable[[str, list[str]], dict[str, Any] | str | Problem]
    touches: tuple[str, ...] = ()


def find(flag: str) -> Foreign | None:
    """What an option of Megatron means here; None when it is not in the tables."""
    if flag in SETS:
        return Foreign(0, lambda _flag, _words: SETS[flag], tuple(SETS[flag]))
    if flag in CHOICES:
        return Foreign(1, lambda _flag, words: _choice(flag, words[0]))
    if flag in LATE:
        return Foreign(1, lambda _flag, words: _late(flag, words[0]), (LATE[flag],))
    if flag == "--train-data-path":
        return Foreign(-1, lambda _flag, words: {"data_path": tuple(words), "@train_data": True}, ("data_path",))
    if flag in data_files.FILES:
        return Foreign(1, data_files.FILES[flag], ("data_path", "valid_data_path"))
    if flag in compat_ignored.IGNORED:
        count, reason = compat_ignored.IGNORED[flag]
        return Foreign(count, lambda _flag, _words: f"no effect: {reason}")
    if flag in compat_refused.ONLY:
        legal, case, fix = compat_refused.ONLY[flag]
        return Foreign(1, lambda _flag, words: _only(flag, words[0], legal, case, fix))
    return _refused(flag)


@cache
def names() -> frozenset[str]:
    """Every spelling in the tables that does something here, for suggestions."""
    return frozenset([*SETS, *CHOICES, *LATE, *data_files.FILES, "--train-data-path"])


def _choice(flag: str, word: str) -> dict[str, Any] | str | Problem:
    table = CHOICES[flag]
    if word not in table:
        return Problem(f"{flag} {word}", f"the choices are {', '.join(table)}", f"{flag} {next(iter(table))}")
    return table[word] or "no effect: it is what isotron does"


def _late(flag: str, word: str) -> dict[str, Any] | Problem:
    if not word.isdecimal() or int(word) == 0:
        return Problem(f"{flag} {word}", f"{word!r} is not a whole number above 0", f"{flag} 1")
    return {LATE[flag]: int(word)}


def _only(flag: str, word: str, legal: tuple[str, ...], case: str, fix: str) -> str | Problem:
    return "no effect: it is what isotron does" if word in legal else Problem(f"{flag} {word}", case, fix)


def _refused(flag: str) -> Foreign | None:
    entry = compat_refused.REFUSED.get(flag)
    if entry is None:
        entry = next((e for start, e in compat_refused.PREFIXES.items() if flag.startswith(start)), None)
    if entry is None:
        return None
    case, fix = entry
    return Foreign(-1, lambda _flag, words: Problem(" ".join([flag, *words]), case, fix))
