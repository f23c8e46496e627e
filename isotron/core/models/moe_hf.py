"""What families with experts share in Hugging Face's spelling: fields of config.json, names of experts. PURE."""

from __future__ import annotations

from typing import Any

from isotron.core.models import llama_hf
from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same, stacked
from isotron.core.nn.moe_config import pattern_text

# what these libraries' simple routers mean
PLAIN_ROUTER: dict[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 0,
    "moe_router_enable_expert_bias": False,
}


def read_sparse(fields: Fields, layers: int) -> dict[str, Any]:
    """Which blocks have experts, by a step and a list of exceptions."""
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    return {"moe_layer_freq": pattern_text([i not in dense and (i + 1) % step == 0 for i in range(layers)])}


def write_sparse(cfg: Any) -> dict[str, Any]:
    """The reverse of `read_sparse`."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(cfg.num_layers) if not cfg.has_experts(i)],
    }


def read_experts(fields: Fields, experts: int, topk: int, width: int) -> dict[str, Any]:
    """Numbers of the experts; the keywords are the library's defaults."""
    fields.seen.add("output_router_logits")  # what their forward returns; no weight depends on it
    return {
        "num_experts": fields.take("num_experts", experts, "num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok", topk),
        "moe_ffn_hidden_size": fields.take("moe_intermediate_size", width),
        "moe_norm_topk_prob": fields.take("norm_topk_prob", False),
        "moe_aux_loss_coeff": float(fields.take("router_aux_loss_coef", 0.001)),
    }


def write_experts(cfg: Any) -> dict[str, Any]:
    """The reverse of `read_experts`."""
    return {
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.moe_router_topk,
        "moe_intermediate_size": cfg.expert_width,
        "norm_topk_prob": cfg.moe_norm_topk_prob,
        "router_aux_loss_coef": cfg.moe_aux_loss_coeff,
        "output_router_logits": False,
    }


def mlp(cfg: Any, i: int, shared: str = "shared_expert") -> list[Mapped]:
    """The MLP of block i, or its router, experts and what every token visits, as Qwen and DeepSeek name them."""
    if not cfg.has_experts(i):
        return llama_hf.mlp(cfg, i)
    return expert_mlp(cfg, f"layers.{i}.mlp", f"model.layers.{i}.mlp", shared)


def expert_mlp(cfg: Any, ours: str, theirs: str, shared: str) -> list[Mapped]:
    """Router, experts and what every token visits."""
    found = [
        same(f"{ours}.router.weight", f"{theirs}.gate.weight", cfg.num_experts),
        *experts(cfg, f"{ours}.experts", f"{theirs}.experts", ("gate_proj", "up_proj", "down_proj")),
    ]
    if cfg.moe_router_enable_expert_bias:
        found.append(same(f"{ours}.router.expert_bias", f"{theirs}.gate.e_score_correction_bias", cfg.num_experts))
    if cfg.shared_width:
        parts = [(f"{theirs}.{shared}.{x}_proj.weight", cfg.shared_width) for x in ("gate", "up")]
        down = f"{theirs}.{shared}.down_proj.weight"
        found += [stacked(f"{ours}.shared.gate_up.weight", parts)]
        found += [same(f"{ours}.shared.down.weight", down, cfg.hidden_size)]
    if cfg.shared_width and cfg.moe_shared_expert_gate:
        found.append(same(f"{ours}.shared_gate.weight", f"{theirs}.shared_expert_gate.weight", 1))
    return found


def experts(cfg: Any, ours: str, theirs: str, names: tuple[str, str, str]) -> list[Mapped]:
    """The matrices of all experts of a block; `names` of gate, up and down."""
    gate, up, down = names
    e, f, d = range(cfg.num_experts), cfg.expert_width, cfg.hidden_size
    return [
        stacked(f"{ours}.gate_up.weight", [(f"{theirs}.{i}.{x}.weight", f) for i in e for x in (gate, up)]),
        stacked(f"{ours}.down.weight", [(f"{theirs}.{i}.{down}.weight", d) for i in e]),
    ]
