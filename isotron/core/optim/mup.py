"""muP: initial weights and learning rates that make one learning rate right for every width. PURE.

A width is counted in multiples m of the base width at which the learning rate was found. Under Adam and Lion, updates
of every element have the same size, so what a matrix adds to a sum over its m times as many inputs must be m times
smaller; initial weights must let sums of random terms keep their size.

| parameter                       | initial weights | learning rate, adamw adam_l2 lion | muon                       |
|---------------------------------|-----------------|-----------------------------------|----------------------------|
| embeddings, gains, biases       | 1               | 1                                 | (stepped by muon_others)   |
| matrices between hidden layers  | m^-1/2          | 1 / m                             | 1; m^-1/2 under spectral   |
| output layer                    | 1 / m           | 1 / m                             | (stepped by muon_others)   |

Widths are compared at one head size: attention then needs no change. Source: Yang et al. 2022 (Tensor Programs V),
table 3; Yang et al. 2023 (spectral condition) for muon.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from isotron.core.optim.config import OptimConfig

OUTPUT = "head.weight"


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix of a block."""
    return len(shape) == 2 and name.startswith("layers.")


def initial_factor(name: str, shape: Sequence[int], width: float) -> float:
    """What the initial values of a parameter are multiplied with at `width` times the base width."""
    if name == OUTPUT:
        return 1.0 / width
    return 1.0 / sqrt(width) if is_hidden(name, shape) else 1.0


def rate_factor(name: str, shape: Sequence[int], width: float, method: str, cfg: OptimConfig) -> float:
    """What the learning rate of a parameter is multiplied with."""
    if name != OUTPUT and not is_hidden(name, shape):
        return 1.0
    if method == "muon":
        return 1.0 / sqrt(width) if cfg.muon_scale_mode == "spectral" else 1.0
    return 1.0 / width


def width_of(hidden_size: int, cfg: OptimConfig) -> float:
    """Multiples of the base width; 1 without muP."""
    return hidden_size / cfg.mup_base_hidden_size if cfg.mup_base_hidden_size else 1.0
