"""Learning rate and weight decay as pure functions of the step. PURE.

`step` counts the updates applied before, as in Megatron: the first step uses `learning_rate(cfg, 0)`, which under
warm-up is `lr_warmup_init`, and the first step after `lr_warmup_iters` updates uses `lr`. Shapes follow Megatron's
scheduler (linear, cosine, inverse-square-root, WSD and its decays).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isotron.core.options import option


@dataclass(frozen=True)
class ScheduleConfig:
    """The config section `[schedule]`."""

    lr: float = option(3e-4, "highest learning rate")
    min_lr: float = option(0.0, "lowest learning rate after decay")
    lr_decay_style: str = option(
        "cosine", "shape after warm-up", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_warmup_iters: int = option(0, "steps of linear warm-up", unit="steps")
    lr_warmup_fraction: float = option(0.0, "warm-up as a fraction of lr_decay_iters; used when lr_warmup_iters is 0")
    lr_warmup_init: float = option(0.0, "learning rate that warm-up starts from")
    lr_decay_iters: int = option(0, "step at which min_lr is reached; 0 means train_iters", unit="steps")
    lr_wsd_decay_iters: int = option(0, "last steps of WSD in which the rate decays", unit="steps")
    lr_wsd_decay_style: str = option(
        "exponential", "shape of the WSD decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    weight_decay: float = option(0.1, "decoupled weight decay; not on biases and norm gains")
    start_weight_decay: float = option(-1.0, "weight decay at the start of its ramp; -1 means weight_decay")
    end_weight_decay: float = option(-1.0, "weight decay at the end of its ramp; -1 means weight_decay")
    weight_decay_incr_style: str = option(
        "constant", "shape of the weight-decay ramp", choices=("constant", "linear", "cosine")
    )


def learning_rate(cfg: ScheduleConfig, step: int) -> float:
    """Learning rate after `step` >= 0 updates. `lr_decay_iters` must be known."""
    warmup = cfg.lr_warmup_iters or round(cfg.lr_warmup_fraction * cfg.lr_decay_iters)
    if warmup and step <= warmup:
        return cfg.lr_warmup_init + (cfg.lr - cfg.lr_warmup_init) * step / warmup
    if cfg.lr_decay_style == "constant":
        return cfg.lr
    if step > cfg.lr_decay_iters:
        return cfg.min_lr
    if cfg.lr_decay_style == "inverse-square-root":
        return max(cfg.min_lr, cfg.lr * math.sqrt(max(warmup, 1) / max(step, 1)))
    done = (step - warmup) / max(1, cfg.lr_decay_iters - warmup)
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * _left(cfg, step, done)


def _left(cfg: ScheduleConfig, step: int, done: float) -> float:
    """The share of lr - min_lr that is left, 1 to 0."""
    match cfg.lr_decay_style:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
    start = cfg.lr_decay_iters - cfg.lr_wsd_decay_iters
    if step <= start:
        return 1.0
    part = (step - start) / cfg.lr_wsd_decay_iters
    match cfg.lr_wsd_decay_style:
        case "linear":
            return 1.0 - part
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * part))
        case "minus_sqrt":
            return 1.0 - math.sqrt(part)
    return 2.0 * 0.5**part - 1.0


def weight_decay(cfg: ScheduleConfig, step: int) -> float:
    """Weight decay after `step` >= 0 updates; ramps over lr_decay_iters."""
    start = cfg.weight_decay if cfg.start_weight_decay < 0 else cfg.start_weight_decay
    end = cfg.weight_decay if cfg.end_weight_decay < 0 else cfg.end_weight_decay
    done = min(1.0, step / max(1, cfg.lr_decay_iters))
    match cfg.weight_decay_incr_style:
        case "linear":
            return start + (end - start) * done
        case "cosine":
            return start + (end - start) * 0.5 * (1.0 + math.cos(math.pi * (1.0 - done)))
    return end
