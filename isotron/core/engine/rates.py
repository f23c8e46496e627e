"""DeepSpeed's learning-rate schedules as functions of the number of updates. PURE.

Parameters and shapes are those of its page on schedulers; a parameter that a schedule lacks is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import cos, floor, log, pi
from typing import Any

from isotron.core.errors import refuse

Rate = Callable[[int], float]
PARAMETERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": None, "cycle_max_lr": None, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
        "cycle_second_step_size": None, "decay_step_size": 0, "cycle_momentum": True,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}  # fmt: skip


def rate(name: str, given: Mapping[str, Any], lr: float) -> Rate:
    """Learning rate after a number of updates; `lr`: the optimizer's, which WarmupCosineLR scales."""
    if name not in PARAMETERS:
        raise refuse(f'"scheduler.type": {name!r}', f"the types are {', '.join(PARAMETERS)}", '"type": "WarmupLR"')
    known = PARAMETERS[name]
    p = {**known, **given}
    odd = [key for key in given if key not in known]
    odd += [key for key, default in known.items() if default is None and p[key] is None and "second" not in key]
    odd += ["cycle_momentum"] if p.get("cycle_momentum") else []
    odd += ["warmup_type"] if p.get("warmup_type", "log") not in ("log", "linear") else []
    if odd:
        case = f"{name} takes {', '.join(known)}; momentum is not cycled, warmup_type is log or linear"
        raise refuse(f'"scheduler.params.{odd[0]}"', case, "these parameters, the ones without a default given")
    match name:
        case "WarmupLR":
            return _warmup(p)
        case "WarmupDecayLR":
            return _warmup_decay(p)
        case "WarmupCosineLR":
            return lambda n: lr * _cosine_ratio(p, n)
        case "OneCycle":
            return _one_cycle(p)
    return lambda n: p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * _interval(p, n))


def _grown(p: Mapping[str, Any], before: int) -> float:
    """The share of the warm-up that is over; 0 at the first update, whose number before is -1."""
    steps = max(2, p["warmup_num_steps"])
    if before >= steps:
        return 1.0
    return log(max(before, 0) + 1) / log(steps) if p["warmup_type"] == "log" else max(before, 0) / steps


def _warmup(p: Mapping[str, Any]) -> Rate:
    low, high = p["warmup_min_lr"], p["warmup_max_lr"]
    return lambda n: float(low + (high - low) * _grown(p, n - 1))


def _warmup_decay(p: Mapping[str, Any]) -> Rate:
    low, high, end = p["warmup_min_lr"], p["warmup_max_lr"], p["total_num_steps"]
    steps = max(2, p["warmup_num_steps"])

    def at(n: int) -> float:
        before = n - 1
        left = _grown(p, before) if before < steps else max(0.0, (end - before) / max(1.0, end - steps))
        return float(low + (high - low) * left)

    return at


def _cosine_ratio(p: Mapping[str, Any], n: int) -> float:
    low, end, least = p["warmup_min_ratio"], p["total_num_steps"], p["cos_min_ratio"]
    steps, before = max(2, p["warmup_num_steps"]), n - 1
    if before < 0:
        return 0.0
    if before < steps:
        return float(low + (1.0 - low) * _grown(p, before))
    done = min(1.0, (before - steps + 1) / max(1, end - steps))
    return float(max(0.0, least + (1.0 - least) * 0.5 * (1 + cos(pi * done))))


def _one_cycle(p: Mapping[str, Any]) -> Rate:
    low, high, up = p["cycle_min_lr"], p["cycle_max_lr"], p["cycle_first_step_size"]
    down = p["cycle_second_step_size"] or up

    def at(n: int) -> float:
        if n <= up + down:
            return float(low + (high - low) * (n / up if n <= up else (up + down - n) / down))
        decay = p["decay_lr_rate"] * (n - up - down) / p["decay_step_size"] if p["decay_step_size"] else 0.0
        return float(low / (1 + decay))

    return at


def _interval(p: Mapping[str, Any], n: int) -> float:
    passed = n / p["lr_range_test_step_size"]
    return float(floor(passed)) if p["lr_range_test_staircase"] else passed
