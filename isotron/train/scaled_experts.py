"""Experts, latent attention and predictions of a model scaled down for `isotron verify`: the same rules. PURE."""

from __future__ import annotations

from typing import Any

from isotron.core.nn.moe_config import MoEConfig, pattern_text


def scaled_experts(model: Any, layers: int, tp: int, ep: int = 1) -> dict[str, Any]:
    """Fields of the small model of `layers` blocks; empty for a model without experts.

    Groups, shared experts and blocks without experts stay where there are some.
    """
    if not isinstance(model, MoEConfig):
        return {}
    groups, chosen = min(model.moe_router_num_groups, 4), min(model.moe_router_group_topk, 2)
    experts = 2 * groups or min(model.num_experts, 6) // ep * ep
    mixed = len(model.moe_layers) < model.num_layers  # type: ignore[attr-defined]
    found = {
        "num_experts": experts,
        "moe_router_topk": min(model.moe_router_topk, 2, experts),
        "moe_ffn_hidden_size": 8 * tp,
        "moe_layer_freq": pattern_text([not mixed or i > 0 for i in range(layers)]),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_scores": min(model.moe_router_group_scores, 2),
        "moe_shared_expert_intermediate_size": 8 * tp if model.shared_width else 0,
        "mtp_num_layers": min(getattr(model, "mtp_num_layers", 0), 1),
        "q_lora_rank": 12 if getattr(model, "q_lora_rank", 0) else 0,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 6,
    }
    return {name: value for name, value in found.items() if hasattr(model, name)}
