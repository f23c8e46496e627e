"""Options of the optimizer and of loss scaling: the config section `[optim]`. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.options import option


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, clipping by one global norm, and the dynamic loss scale of float16."""

    optimizer: str = option("adamw", "the update rule", choices=("adamw",))
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.95, "decay of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    clip_grad: float = option(1.0, "largest global gradient norm; 0 means no clipping")
    loss_scale: float = option(0.0, "fixed loss scale for float16; 0 means dynamic")
    initial_loss_scale: float = option(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = option(1.0, "lowest dynamic loss scale")
    loss_scale_window: int = option(1000, "clean steps before the loss scale doubles", unit="steps")
    hysteresis: int = option(2, "overflows before the loss scale halves")
