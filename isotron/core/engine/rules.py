"""Update rules of an engine: from its config, or read from an optimizer of torch whose groups keep the rates.

Learning rates and weight decay are always read from `param_groups`, so that schedulers of torch and of DeepSpeed work
as they stand; moments and masters are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isotron.core.engine.config import EngineConfig
from isotron.core.errors import refuse
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.groups import Settings, is_hidden_matrix

# what a group of torch may hold beside lr and weight_decay, and the only value that changes nothing
_PLAIN: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "nesterov": False,
    "dampening": 0,
    "differentiable": False,
}


class Rates(torch.optim.Optimizer):
    """Parameter groups with their rates; the engine steps."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float) -> None:
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: gradients are not where torch would look for them."""
        raise refuse("optimizer.step()", "the engine owns gradients and state", "engine.step()")


def from_config(cfg: EngineConfig, params: Iterable[Any]) -> tuple[Rates, str, OptimConfig]:
    """(groups, rule, its options) for parameters, or for groups of them with `lr` and `weight_decay`."""
    if cfg.optimizer is None:
        fix = '"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, or initialize(optimizer=...)'
        raise refuse("initialize without an optimizer", "neither the config nor the call has one", fix)
    return Rates(params, cfg.lr, cfg.weight_decay), cfg.optimizer, cfg.optim


def from_torch(optimizer: torch.optim.Optimizer, base: OptimConfig) -> tuple[str, OptimConfig]:
    """(rule, its options) of AdamW, Adam, SGD or Adafactor of torch."""
    groups = optimizer.param_groups
    for name, plain in _PLAIN.items():
        if any(group.get(name, plain) != plain for group in groups):
            raise refuse(
                f"{type(optimizer).__name__}({name}=...)", f"only {name}={plain} is known here", "leave it out"
            )
    for name in ("betas", "eps", "momentum", "beta2_decay", "d"):
        if len({str(group.get(name)) for group in groups}) > 1:
            raise refuse(f"groups with another {name} each", "groups differ in lr and weight_decay only", "one value")
    first = groups[0]
    match type(optimizer).__name__:
        case "AdamW" | "Adam":
            decoupled = type(optimizer).__name__ == "AdamW" or first.get("decoupled_weight_decay", False)
            beta1, beta2 = first["betas"]
            optim = replace(base, adam_beta1=beta1, adam_beta2=beta2, adam_eps=first["eps"])
            return ("adamw" if decoupled else "adam_l2"), optim
        case "SGD":
            return "sgd", replace(base, sgd_momentum=first["momentum"])
        case "Adafactor":
            floor, least = first["eps"]
            chosen = {"adafactor_decay": -first["beta2_decay"], "adafactor_clip": first["d"]}
            return "adafactor", replace(base, adafactor_eps=floor or 0.0, adafactor_min_rms=least, **chosen)
    known = "AdamW, Adam, SGD and Adafactor of torch are known; Lion and Muon by the config"
    raise refuse(f"an optimizer of type {type(optimizer).__name__}", known, "torch.optim.AdamW(model.parameters())")


def settings(groups: list[dict[str, Any]], named: Mapping[str, Tensor], rule: str, others: str) -> dict[str, Settings]:
    """Per parameter: its group's rates as multiples of one; frozen what does not train or is in no group."""
    group_of = {id(p): group for group in groups for p in group["params"]}
    found = {}
    for name, p in named.items():
        group = group_of.get(id(p))
        method = others if rule == "muon" and not is_hidden_matrix(name, p.shape) else rule
        if group is None or not p.requires_grad:
            found[name] = Settings(method, frozen=True)
        else:
            found[name] = Settings(method, float(group["lr"]), float(group.get("weight_decay", 0.0)))
    return found
