"""Mixture of experts as options: how many, which blocks have them, how tokens choose. PURE.

A family with experts inherits these fields; `router.py` and `moe.py` compute with them. Sources: Shazeer et al. 2017,
Lepikhin et al. 2020 (capacity), Fedus et al. 2021 (balance loss), Zoph et al. 2022 (z-loss), Dai et al. 2024
(DeepSeekMoE: shared experts), DeepSeek-AI 2024 (groups, selection bias), Clark et al. 2022 (Sinkhorn routing).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from isotron.core.errors import refuse
from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.options import option

BALANCES = ("none", "sequence", "global", "batch", "sinkhorn")
_EXAMPLE = '--moe-layer-freq "[0]*3+[1]*58"'
_BITS = re.compile(r"\[([01](?:,[01])*)\]")
_TIMES = re.compile(r"\*(\d+)")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Fields of every family with experts."""

    num_experts: int = option(8, "experts of a block")
    moe_router_topk: int = option(2, "experts that a token visits")
    moe_ffn_hidden_size: int = option(0, "width of one expert; 0 means ffn_hidden_size")
    moe_layer_freq: str = option(
        "1", "which blocks have experts: N means every Nth from the first, or ones and zeros such as [0]*3+[1]*58"
    )
    moe_router_score_function: str = option(
        "softmax", "how logits become scores, over all experts", choices=("softmax", "sigmoid")
    )
    moe_norm_topk_prob: bool = option(True, "the weights of a token's experts sum to 1: softmax over the chosen ones")
    moe_router_topk_scaling_factor: float = option(1.0, "factor of the weights of a token's experts")
    moe_router_num_groups: int = option(0, "groups of experts of which a token chooses first; 0 means none")
    moe_router_group_topk: int = option(0, "groups that a token's experts come from")
    moe_router_group_scores: int = option(
        0, "best scores of a group that are added up to rank it; 0 means topk / group_topk"
    )
    moe_router_enable_expert_bias: bool = option(
        False, "experts are chosen by score plus a bias that follows their load; weights are without it"
    )
    moe_router_bias_update_rate: float = option(1e-3, "how far the bias of an expert moves per step")
    moe_router_load_balancing_type: str = option(
        "sequence",
        "what the balance loss compares: each sequence, the whole step (global: one more forward per step), each "
        "microbatch (batch: depends on its size); or sinkhorn routing",
        choices=BALANCES,
    )
    moe_aux_loss_coeff: float = option(0.0, "factor of the balance loss")
    moe_z_loss_coeff: float = option(0.0, "factor of the mean square of log-sum-exp of router logits")
    moe_input_jitter_eps: float = option(0.0, "router inputs are multiplied with 1 +- this in training")
    moe_expert_capacity_factor: float = option(
        0.0, "in training an expert takes at most this times its even share of each sequence; 0 drops nothing"
    )
    moe_token_drop_policy: str = option(
        "probs", "which tokens an expert beyond its capacity drops", choices=("probs", "position")
    )
    moe_pad_expert_input_to_capacity: bool = option(False, "every expert computes on its whole capacity")
    moe_shared_expert_intermediate_size: int = option(0, "width of the expert that every token visits; 0 means none")
    moe_shared_expert_gate: bool = option(False, "the shared expert's output is multiplied with a sigmoid gate")

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts instead of one MLP."""
        return layer_pattern(self.moe_layer_freq, self._blocks())[layer]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The blocks with experts."""
        return tuple(i for i in range(self._blocks()) if self.has_experts(i))

    def _blocks(self) -> int:
        return int(getattr(self, "num_layers", 0))

    @property
    def group_scores(self) -> int:
        """Best scores that rank a group, with the default filled in."""
        return self.moe_router_group_scores or max(1, self.moe_router_topk // max(1, self.moe_router_group_topk))

    @property
    def expert_width(self) -> int:
        """F of one expert."""
        return self.moe_ffn_hidden_size or int(getattr(self, "ffn", 0))

    @property
    def shared_width(self) -> int:
        """F of the shared expert, 0 where there is none."""
        return self.moe_shared_expert_intermediate_size

    @property
    def aux_terms(self) -> dict[str, int]:
        """Names and sizes of what the blocks with experts report in training, summed over all tokens of a step."""
        return self.terms_of([f"layers.{i}" for i in self.moe_layers])

    def terms_of(self, blocks: Sequence[str]) -> dict[str, int]:
        """The same for the named blocks."""
        balanced = self.moe_router_load_balancing_type in ("sequence", "global", "batch")
        asked = {
            "load": self.num_experts,
            "balance": int(balanced and self.moe_aux_loss_coeff != 0),
            "z": int(self.moe_z_loss_coeff != 0),
            "dropped": int(self.moe_expert_capacity_factor != 0),
        }
        return {f"{what}/{block}": n for block in blocks for what, n in asked.items() if n}

    def visited(self, pattern: str) -> float:
        """The part of a matrix that one token is multiplied with."""
        return self.moe_router_topk / self.num_experts if ".experts." in pattern else 1.0


@lru_cache(maxsize=256)
def layer_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Which of `layers` blocks have experts; refuses what is neither a number nor a pattern of as many entries."""
    if text.isdecimal() and int(text) > 0:
        return tuple(i % int(text) == 0 for i in range(layers))
    bits, rest = _sum(text.replace(" ", ""), text)
    if rest or len(bits) != layers:
        case = f"{len(bits)} entries for {layers} blocks" if not rest else f"{rest[:12]!r} is not understood"
        raise refuse(f"--moe-layer-freq {text}", case, _EXAMPLE)
    return tuple(bits)


def pattern_text(which: Sequence[bool]) -> str:
    """The shortest text that `layer_pattern` reads as these blocks."""
    if all(which):
        return "1"
    return "+".join(f"[{int(bit)}]*{len(list(run))}" for bit, run in groupby(which))


def _sum(rest: str, text: str) -> tuple[list[bool], str]:
    """Terms joined by +, and what follows them."""
    bits, rest = _term(rest, text)
    while rest.startswith("+"):
        more, rest = _term(rest[1:], text)
        bits = bits + more
    return bits, rest


def _term(rest: str, text: str) -> tuple[list[bool], str]:
    """A list or a group in brackets, perhaps times a number."""
    found = _BITS.match(rest)
    if found:
        bits, rest = [bit == "1" for bit in found[1].split(",")], rest[found.end() :]
    elif rest.startswith("("):
        bits, rest = _sum(rest[1:], text)
        if not rest.startswith(")"):
            raise refuse(f"--moe-layer-freq {text}", "a bracket is not closed", _EXAMPLE)
        rest = rest[1:]
    else:
        case = f"{rest[:12]!r} is neither a number nor ones and zeros in brackets"
        raise refuse(f"--moe-layer-freq {text}", case, _EXAMPLE)
    times = _TIMES.match(rest)
    return (bits * int(times[1]), rest[times.end() :]) if times else (bits, rest)


def expert_rules(cfg: Any, dense: Sequence[Rule], std: float, out_std: float) -> tuple[Rule, ...]:
    """Layout of the MLPs of a model whose blocks without experts have the rules `dense` (patterns of layers.*).

    Experts stand one below the other in one matrix each: expert e is rows [2eF, 2eF + 2F) of gate_up, of which the
    first half is its gate, and rows [eD, eD + D) of down, whatever the layout.
    """
    e, d, f, shared = cfg.num_experts, cfg.hidden_size, cfg.expert_width, cfg.shared_width
    mlp = "layers.*.mlp"
    rules = [
        Rule(f"{mlp}.router.weight", (e, d), std=std),
        Rule(
            f"{mlp}.experts.gate_up.weight", (2 * e * f, d), Split(0, (Part(f), Part(f)) * e, "etp"), std=std, experts=e
        ),
        Rule(f"{mlp}.experts.down.weight", (e * d, f), Split(1, (Part(f),), "etp"), std=out_std, experts=e),
    ]
    if cfg.moe_router_enable_expert_bias:
        rules.append(Rule(f"{mlp}.router.expert_bias", (e,), init="zeros", decay=False, buffer=True))
    if shared:
        part = Part(shared)
        rules.append(Rule(f"{mlp}.shared.gate_up.weight", (2 * shared, d), Split(0, (part, part)), std=std))
        rules.append(Rule(f"{mlp}.shared.down.weight", (d, shared), Split(1, (part,)), std=out_std))
    if shared and cfg.moe_shared_expert_gate:
        rules.append(Rule(f"{mlp}.shared_gate.weight", (1, d), std=std))
    return by_layer(cfg, rules, dense)


def with_experts(cfg: Any, table: Table) -> Table:
    """The table of a model with MLPs (`layers.*.mlp.`), with experts where the pattern says so."""
    std = cfg.init_method_std
    dense = [rule for rule in table.rules if rule.pattern.startswith("layers.*.mlp.")]
    rest = tuple(rule for rule in table.rules if rule not in dense)
    return replace(table, rules=(*expert_rules(cfg, dense, std, std / (2 * cfg.num_layers) ** 0.5), *rest))


def by_layer(cfg: Any, expert: Sequence[Rule], dense: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules for all blocks where all have experts, else one set of rules per block."""
    which = layer_pattern(cfg.moe_layer_freq, cfg._blocks())
    if all(which):
        return tuple(expert)
    return tuple(
        replace(rule, pattern=rule.pattern.replace("*", str(i), 1))
        for i, has in enumerate(which)
        for rule in (expert if has else dense)
    )
