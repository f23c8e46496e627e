"""What a rule is, and the ranges of single values. PURE.

A rule has a name, the leaves it looks at, a predicate that says whether it is broken, and the problem to report. Rules
see a finished config (`finish`) and facts of the world. The fix of every problem begins with options and values that
satisfy the rule; a test reads them back and applies them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

from isotron.config.catalogue import catalogue
from isotron.config.schema import RunConfig, value
from isotron.core.errors import Problem


def is_no_directory(path: str) -> bool:
    """Whether there is something else than a directory: a file, a device, a pipe."""
    return os.path.exists(path) and not os.path.isdir(path)


@dataclass(frozen=True)
class Facts:
    """The world of a run: processes given by a launcher (None: isotron starts them), accelerators, tokenizer, files.

    `own_tokenizer`: the copy in the checkpoint that the run goes on from; empty where there is none.
    """

    world_size: int | None = None
    device_count: int = 0
    tokenizer_vocab: int = 0
    own_tokenizer: str = ""
    exists: Callable[[str], bool] = os.path.exists
    is_file: Callable[[str], bool] = is_no_directory


@dataclass(frozen=True)
class Rule:
    """`broken(config, facts)` says whether the rule is violated, `problem(config, facts)` then says how."""

    name: str
    leaves: tuple[str, ...]
    broken: Callable[[RunConfig, Facts], bool]
    problem: Callable[[RunConfig, Facts], Problem]


_BLOCKS = {"num_layers": ("num_layers", "encoder_num_layers", "decoder_num_layers")}


def flag(leaf: str) -> str:
    """--hidden-size for hidden_size."""
    return "--" + leaf.replace("_", "-")


def asked(config: RunConfig, *leaves: str) -> str:
    """Options with their values, as typed; of those that the family has."""
    found = [x for leaf in leaves for x in _BLOCKS.get(leaf, (leaf,)) if leaf == x or value(config, leaf) is None]
    return " ".join(f"{flag(leaf)} {_text(value(config, leaf))}" for leaf in found if value(config, leaf) is not None)


def moved(config: RunConfig, *leaves: str) -> tuple[str, ...]:
    """Those of the leaves that are not at their default: a message names no option that nobody gave."""
    return tuple(leaf for leaf in leaves if value(config, leaf) not in (None, catalogue()[leaf].default))


def _text(v: Any) -> str:
    if isinstance(v, tuple):
        return " ".join(v) if v and isinstance(v[0], str) else ",".join(map(str, v))
    return str(v).lower() if isinstance(v, bool) else str(v)


def nearest_divisor(n: int, near: int) -> int:
    """The divisor of n that is closest to `near`, the smaller one of two."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return min((*small, *(n // d for d in small)), key=lambda d: (abs(d - near), d))


@dataclass(frozen=True)
class Range:
    """Legal values of one number; `example` is one of them."""

    leaf: str
    case: str
    legal: Callable[[Any], bool]
    example: Any

    def rule(self) -> Rule:
        """The range as a rule; a family without the field satisfies it."""
        return Rule(
            f"range of {self.leaf}",
            (self.leaf,),
            lambda c, f: value(c, self.leaf) is not None and not self.legal(value(c, self.leaf)),
            lambda c, f: Problem(
                asked(c, self.leaf), f"{self.leaf} must be {self.case}", f"{flag(self.leaf)} {self.example}"
            ),
        )


_POSITIVE = {
    "num_layers": 12, "encoder_num_layers": 12, "type_vocab_size": 2,
    "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024, "tp": 1, "pp": 1, "vpp": 1,
    "cp": 1, "ep": 1,
    "mlp_chunks": 1,
    "micro_batch_size": 1, "train_iters": 1000, "recompute_num_layers": 1, "make_vocab_size_divisible_by": 128,
    "ddp_bucket_size": 40000000, "log_interval": 1, "loss_scale_window": 1000, "hysteresis": 2, "norm_epsilon": 1e-5,
    "rope_theta": 10000.0, "rope_percent": 1.0, "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0, "rope_beta_fast": 32.0, "rope_beta_slow": 1.0,
    "init_method_std": 0.02, "adam_eps": 1e-8, "num_experts": 8, "moe_router_topk": 2,
    "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "moe_router_topk_scaling_factor": 1.0, "muon_ns_steps": 5, "muon_extra_scale_factor": 0.2,
}  # fmt: skip
_NOT_NEGATIVE = {
    "vocab_extra_ids": 100, "decoder_num_layers": 0, "decoder_seq_length": 0, "decoder_start_token_id": 0,
    "mup_base_hidden_size": 256, "q_lora_rank": 0, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1,
    "moe_ffn_hidden_size": 0, "moe_router_num_groups": 0, "moe_router_group_topk": 0, "moe_router_group_scores": 0,
    "moe_router_bias_update_rate": 0.001, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001,
    "moe_expert_capacity_factor": 1.25, "moe_shared_expert_intermediate_size": 0,
    "etp": 0, "zero_shard_size": 0, "trace": 0, "schedule_memory": 0, "microbatch_group": 0, "recompute_keep": 0,
    "deferred_logits": 0,
    "max_live_parameters": 0, "max_live_gradients": 0,
    "activation_budget_gib": 0, "cpu_offloading_num_layers": 0, "max_seqlen_per_dp_cp_rank": 0,
    "num_key_value_heads": 0, "head_dim": 0, "ffn_hidden_size": 0, "vocab_size": 50257, "max_position_embeddings": 0,
    "dp": 1, "first_stage_layers": 0, "last_stage_layers": 0, "global_batch_size": 128, "eval_interval": 0,
    "eval_iters": 10, "check_interval": 100, "stuck_after_s": 1800.0,
    "save_interval": 1000, "keep_last": 0, "keep_every": 0, "straggler_interval": 0, "exit_duration_in_mins": 0.0,
    "local_save_interval": 0, "local_save_ranks": 0,
    "lr_warmup_iters": 0, "lr_decay_iters": 0, "lr_wsd_decay_iters": 0, "lr": 0.0003, "min_lr": 0.0,
    "lr_warmup_init": 0.0, "clip_grad": 1.0, "weight_decay": 0.1, "adafactor_min_rms": 1e-3, "adafactor_eps": 0.0,
    "adafactor_decay": 0.8,
}  # fmt: skip
_PROBABILITY = {
    "moe_input_jitter_eps": 0.01, "hidden_dropout": 0.1, "attention_dropout": 0.1, "adam_beta1": 0.9,
    "adam_beta2": 0.95, "sgd_momentum": 0.9, "lion_beta1": 0.95, "lion_beta2": 0.98, "muon_momentum": 0.95,
}  # fmt: skip
_SCALE = {"initial_loss_scale": 65536.0, "min_loss_scale": 1.0}
_RAMP = {"start_weight_decay": 0.0, "end_weight_decay": 0.1}

# beyond these a typing error would keep the checks themselves busy, or the machine, before anyone could say so
_MOST = {
    "num_layers": 10_000, "encoder_num_layers": 10_000, "decoder_num_layers": 10_000, "type_vocab_size": 10**9,
    "decoder_seq_length": 10**9, "hidden_size": 10**9, "ffn_hidden_size": 10**9, "num_attention_heads": 10**6,
    "num_key_value_heads": 10**6, "head_dim": 10**9, "vocab_size": 10**9, "make_vocab_size_divisible_by": 10**9,
    "seq_length": 10**9, "max_position_embeddings": 10**9, "micro_batch_size": 10**9, "global_batch_size": 10**12,
    "num_experts": 10**5, "moe_router_topk": 10**5, "moe_ffn_hidden_size": 10**9,
    "tp": 10_000, "pp": 10_000, "vpp": 1000, "dp": 10**6, "cp": 10_000, "ep": 10**5, "etp": 10_000,
}  # fmt: skip


def _at_most(leaf: str, case: str, legal: Callable[[Any], bool], example: Any) -> Range:
    """A range with the upper bound of `_MOST`, where there is one."""
    most = _MOST.get(leaf)
    if most is None:
        return Range(leaf, case, legal, example)
    return Range(leaf, f"{case} and at most {most}", lambda v: legal(v) and v <= most, example)


RANGES: tuple[Rule, ...] = tuple(
    r.rule()
    for r in (
        *(_at_most(leaf, "above 0", lambda v: v > 0, e) for leaf, e in _POSITIVE.items()),
        *(_at_most(leaf, "0 or more", lambda v: v >= 0, e) for leaf, e in _NOT_NEGATIVE.items()),
        *(Range(leaf, "at least 0 and below 1", lambda v: 0 <= v < 1, e) for leaf, e in _PROBABILITY.items()),
        *(
            Range(leaf, "above 0 and at most 1e30 (float32 ends at 3e38)", lambda v: 0 < v <= 1e30, e)
            for leaf, e in _SCALE.items()
        ),
        Range("loss_scale", "from 0 to 1e30 (float32 ends at 3e38)", lambda v: 0 <= v <= 1e30, 0.0),
        Range("seed", "between 0 and 4294967295", lambda v: 0 <= v < 2**32, 1234),
        Range("lr_warmup_fraction", "between 0 and 1", lambda v: 0 <= v <= 1, 0.01),
        Range("adafactor_clip", "1 or more", lambda v: v >= 1, 1.0),
        Range("fim_rate", "between 0 and 1", lambda v: 0 <= v <= 1, 0.5),
        Range("fim_spm_rate", "between 0 and 1", lambda v: 0 <= v <= 1, 0.5),
        Range("mask_prob", "above 0 and below 1", lambda v: 0 < v < 1, 0.15),
        Range("mean_span_length", "1 or more", lambda v: v >= 1, 3.0),
        *(
            Range(leaf, "between 0 and 1", lambda v: 0 <= v <= 1, e)
            for leaf, e in {"mask_replace_prob": 0.8, "random_replace_prob": 0.1, "short_seq_prob": 0.0}.items()
        ),
        Range("mask_token_id", "an id, or -1 for the tokenizer's", lambda v: v >= -1, -1),
        *(
            Range(leaf, "0 or more, or -1 for weight_decay", lambda v: v >= 0 or v == -1, e)
            for leaf, e in _RAMP.items()
        ),
    )
)
