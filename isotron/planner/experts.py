"""What the planner needs to know of a model's experts. PURE.

Experts of isotron's families are cut by width over tensor-parallel ranks. Those of published runs (`shapes.MoEConfig`)
are not: each tensor-parallel rank sends its own part of the tokens to whole experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isotron.core.nn.moe_config import MoEConfig


@dataclass(frozen=True)
class ExpertSizes:
    """Experts, visits per token, local widths of an expert and of what every token visits; whether experts are cut."""

    number: int
    visits: int
    width: float
    shared: float
    cut: bool

    @property
    def elements(self) -> float:
        """Feed-forward elements of one token on one rank."""
        return self.visits * self.width + self.shared


def expert_sizes(config: Any, tp: int = 1, etp: int = 0) -> ExpertSizes | None:
    """None for a model without experts. `etp`: ranks that cut the width of an expert, 0 means tp."""
    if isinstance(config, MoEConfig):
        width, shared = config.expert_width / (etp or tp), config.shared_width / tp
        return ExpertSizes(config.num_experts, config.moe_router_topk, width, shared, True)
    if getattr(config, "experts", 0):
        return ExpertSizes(config.experts, config.topk, config.moe_ffn or config.ffn, 0.0, False)
    return None


def number_of_experts(config: Any) -> int:
    """1 for a model without experts."""
    found = expert_sizes(config)
    return found.number if found else 1
