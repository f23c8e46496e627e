"""What a block computes and moves, counted from the layout table. PURE. Legend as in `activations.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any

from isotron.core.layout import Rule, shard
from isotron.core.parallel.costs import unread_products
from isotron.planner.experts import expert_sizes, number_of_experts
from isotron.planner.job import Job


@dataclass(frozen=True)
class Product:
    """A matrix that tokens are multiplied with: local outputs and inputs, and the part of it that one token meets."""

    outputs: int
    inputs: int
    met: float = 1.0

    @property
    def multiplications(self) -> float:
        """Multiply-adds per token."""
        return self.outputs * self.inputs * self.met


def block_products(config: Any, tp: int, etp: int = 0) -> tuple[Product, ...]:
    """The matrices of the model's last block as one tensor-parallel rank holds them; experts are cut `etp` times, 0
    means tp.
    """
    return tuple(named_products(config, tp, etp).values())


@lru_cache(maxsize=4096)
def named_products(config: Any, tp: int, etp: int = 0) -> Mapping[str, Product]:
    """The same by their names in the block."""
    last = f"layers.{config.num_layers - 1}"
    rules = config.layout(config.vocab_size).rules
    chosen: dict[str, Rule] = {}
    for r in rules:
        where, name = ".".join(r.pattern.split(".")[:2]), ".".join(r.pattern.split(".")[2:])
        if len(r.shape) == 2 and where.startswith("layers.") and fnmatchcase(last, where):
            chosen.setdefault(name, r)
    return {name: _product(config, r, tp, etp or tp) for name, r in chosen.items()}


def _product(config: Any, rule: Rule, tp: int, etp: int) -> Product:
    shape = shard(rule, {"tp": 0, "etp": 0}, {"tp": tp, "etp": etp}).shape
    visited = getattr(config, "visited", None)
    met = visited(rule.pattern) if visited else 1.0
    # an expert's matrix is one of several below each other: what one product sees is one of them
    experts = number_of_experts(config) if ".experts." in rule.pattern else 1
    return Product(shape[0] // experts, shape[1], met * experts)


def head_product(config: Any, layout: Any) -> Product:
    """The output layer."""
    return Product(layout.padded_vocab(config.vocab_size) // layout.tp, config.hidden_size)


def attention_flops(job: Job, causal: bool) -> float:
    """FLOPs of scores and values of one microbatch and block on one rank, forward."""
    c = job.config
    keys = (job.seq + 1) / 2 if causal and getattr(c, "causal", True) else job.seq
    if hasattr(c, "attended"):  # some blocks look at a window only
        keys = c.attended(job.seq)
    widths = c.head_size + getattr(c, "v_head_dim", c.head_size)
    return 2.0 * c.num_attention_heads / job.layout.tp * widths * keys * job.tokens


def unread(job: Job) -> float:
    """Multiply-adds per token and average block, on all ranks, that full recompute does not repeat."""
    return 0.0 if job.whole_recompute else unread_products(job.config, job.layout)


@lru_cache(maxsize=4096)
def is_gated(config: Any) -> bool:
    """Whether the MLP multiplies by a gate."""
    return any("gate_up" in r.pattern for r in config.layout(config.vocab_size).rules)


def element_traffic(job: Job) -> float:
    """Bytes that norms, residuals, activations and rotations read and write in a block's forward."""
    c, tp = job.config, job.layout.tp
    share = tp if job.layout.sequence_parallel else 1
    gated = is_gated(c)
    width = _width(c, tp)
    hidden = 10 * c.hidden_size / share
    experts = expert_sizes(c, tp)
    if experts:  # tokens put in the order of their experts, and back
        hidden += 4 * experts.visits * c.hidden_size / share
    turned = 2 * (c.num_attention_heads / tp + max(1, c.kv_heads / tp)) * c.head_size if hasattr(c, "rope_theta") else 0
    return float((hidden + (3 if gated else 2) * width + turned) * job.element * job.tokens)


def _width(config: Any, tp: int) -> float:
    experts = expert_sizes(config, tp)
    return float(experts.elements) if experts else float(config.ffn / tp)


def score_traffic(job: Job, scores: float, backward: bool) -> float:
    """Bytes of scores that are not fused, so many of each head: written, masked, normalised, dropped and read again."""
    return float(job.config.num_attention_heads / job.layout.tp * scores * (16 if backward else 11))


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step by definition, over all devices."""

    model: float  # products of the mathematics, causal attention
    full: float  # the same with the whole square of attention
    hardware: float  # full, with what is computed again


def _of_pairs(job: Job) -> Flops:
    """The same of pairs that an encoder and a decoder read."""
    model, full, again = 0.0, 0.0, 0.0
    for causal in (True, False):
        each, output = job.config.multiplications(job.seq, causal)
        model, full = full, 2.0 * job.global_batch * (sum(map(sum, each)) + output)
    if job.layout.recompute == "full":
        left_out = unread(job) * job.config.block_tokens(job.seq)
        again = full - 2.0 * job.global_batch * (output + left_out)
    return Flops(3 * model, 3 * full, 3 * full + again)


def _multiplications(config: Any, of: tuple[str, ...] = ("layers.", "mtp.")) -> float:
    """Multiply-adds per token in the matrices of all blocks and of those that predict further tokens, or of others."""
    total, visited = 0.0, getattr(config, "visited", lambda pattern: 1.0)
    for rule in config.layout(config.vocab_size).rules:
        if len(rule.shape) == 2 and rule.pattern.startswith(of):
            blocks = config.num_layers if rule.pattern.startswith("layers.*") else 1
            total += prod(rule.shape) * visited(rule.pattern) * blocks
    return total


def step_flops(job: Job) -> Flops:
    """FLOPs of a step; a tied output layer counts, look-ups do not."""
    c = job.config
    if hasattr(c, "multiplications"):
        return _of_pairs(job)
    behind = c.vocab_size * c.hidden_size + _multiplications(c, ("transform.",))
    matrices = _multiplications(c) + behind
    tokens = float(job.step_tokens)
    core = 2.0 * c.num_attention_heads * (c.head_size + getattr(c, "v_head_dim", c.head_size)) * c.num_layers
    square = core * job.seq
    causal = core * (job.seq + 1) / 2 if getattr(c, "causal", True) else square
    again = 0.0
    if job.layout.recompute == "full":
        left_out = unread(job) * c.num_layers
        again = 2 * (matrices - behind - left_out) + square
    return Flops(
        3 * tokens * (2 * matrices + causal),
        3 * tokens * (2 * matrices + square),
        3 * tokens * (2 * matrices + square) + tokens * again,
    )
