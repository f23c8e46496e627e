"""Saved tensors of latent attention and of experts, per token, read off `mla.py`, `router.py`, `experts.py` in `nn`.
PURE. Legend as in `activations.py`; E experts, k of them per token, Q and R widths of latent vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from isotron.core.nn.moe_config import MoEConfig

IDS = 8  # bytes of a token id


@dataclass(frozen=True)
class Kept:
    """One saved tensor: name, elements per token, bytes per element; `parts`: the modules whose selective recompute
    spares it.
    """

    name: str
    elements: float
    size: int
    parts: tuple[str, ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes per token."""
        return self.elements * self.size

    def times(self, share: float) -> Kept:
        """The part of it that a block has on average."""
        return replace(self, elements=self.elements * share)


def is_latent(config: Any) -> bool:
    """Whether keys and values unfold from a latent vector."""
    return getattr(config, "kv_lora_rank", 0) > 0


def latent_attention(config: Any, heads: int, element: int, wide: int) -> list[Kept]:
    """Projections and the core of latent attention, which computes in tiles and keeps no probabilities."""
    c, e = config, element
    size, query = c.qk_head_dim + c.qk_pos_emb_head_dim, c.q_lora_rank
    return [
        Kept("latent queries and their norm", 2 * query, e),
        Kept("latent norm statistics", 1 + bool(query), wide),
        Kept("latent keys and values, turned key", c.kv_lora_rank + c.qk_pos_emb_head_dim, e),
        Kept("norm of latent keys and values", c.kv_lora_rank, e),
        Kept("unfolded keys and values", heads * (c.qk_head_dim + c.v_head_dim), e),
        Kept("q, k", 2 * heads * size, e),
        Kept("log-sum-exp", heads, wide),
        Kept("attention output", heads * c.v_head_dim, e),
    ]


def expert_share(config: Any) -> float:
    """The part of the blocks that has experts; 0 for a model without."""
    blocks = config.num_layers
    return len(config.moe_layers) / blocks if isinstance(config, MoEConfig) else 0.0


def routed(config: MoEConfig, hidden: int, tp: int, seq: int, element: int, wide: int) -> list[Kept]:
    """Routing, the tokens in the order of their experts, and what the experts keep."""
    k, e, act = config.moe_router_topk, element, ("moe_act", "mlp")
    width, shared = config.expert_width / tp, config.shared_width / tp
    found = [
        Kept("router scores", _scores(config, seq), wide),
        Kept("chosen experts and order of tokens", 2 * k, IDS),
        Kept("weights of experts", _weights(config), wide),
        Kept("tokens by expert", k * hidden, e),
        Kept("experts up", 2 * k * width, e),
        Kept("experts activation", k * width, e, act),
        Kept("shared expert up", 2 * shared, e),
        Kept("shared expert activation", shared, e, act),
    ]
    return [replace(t, parts=t.parts or ("mlp",)) for t in found]


def _again(config: MoEConfig) -> bool:
    """Whether the weights of the chosen experts come from their logits, not from the scores of all."""
    softmax = config.moe_router_score_function == "softmax"
    return config.moe_router_load_balancing_type == "sinkhorn" or (softmax and config.moe_norm_topk_prob)


def _scores(config: MoEConfig, seq: int) -> float:
    """Scores of all experts, the logits beside them, and for a balance loss how often each was visited by a row."""
    balanced = any(name.startswith("balance") for name in config.aux_terms)
    return config.num_experts * (1 + _again(config) + balanced / seq)


def _weights(config: MoEConfig) -> int:
    """Weights that the experts are given, what made them sum to 1, and the sum that makes shares of sigmoids."""
    k, sigmoid = config.moe_router_topk, config.moe_router_score_function == "sigmoid"
    divided = sigmoid and not _again(config) and config.moe_norm_topk_prob and k > 1
    return k + k * _again(config) + (k + 1) * divided + sigmoid
