"""A block's experts: router, dispatcher, experts, and the expert that every token visits.

Legend: B batch, S sequence (its local part), D hidden, F feed-forward of one expert. Socket `dispatcher`: how tokens
come to their experts and back. In halves, the tokens of one half of a microbatch are under way while experts compute
the other. Sources: Shazeer et al. 2017; Dai et al. 2024 (shared experts); DeepSeek-AI 2024b, section 3.2.1 (two
microbatches that hide each other's transfers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.nn.block import ExpertBlock, PreNormBlock
from isotron.core.nn.context import Context
from isotron.core.nn.dispatch import Dispatcher, Local, Sent, halves, whole
from isotron.core.nn.experts import Experts, Gate
from isotron.core.nn.linear import Linear
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.moe_config import MoEConfig
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.router import Router


class MoE(nn.Module):
    """Stands in for a block's MLP. `name`: of the block. `bias`: the router and the experts have biases.

    `unasked`: in a second forward, that nothing reads the result; it is not brought back from the experts.
    """

    def __init__(self, cfg: MoEConfig, hidden: int, name: str, gate: Gate | None = None, bias: bool = False) -> None:
        super().__init__()
        self.router = Router(cfg, hidden, name, bias)
        self.experts = Experts(cfg.num_experts, hidden, cfg.expert_width, gate, bias)
        self.shared: nn.Module | None = None
        self.shared_gate: nn.Module | None = None
        if cfg.shared_width:
            self.shared = GatedMLP(hidden, cfg.shared_width)
            self.shared_gate = Linear(hidden, 1) if cfg.moe_shared_expert_gate else None
        self.dispatcher: Dispatcher = Local()
        self.recompute = self.in_halves = False
        self.unasked: torch.Size | None = None

    def set_halves(self) -> None:
        """From now on a microbatch goes through in two halves, which are routed together."""
        self.in_halves = True
        for layer in (self.experts, self.shared, self.shared_gate):
            for p in () if layer is None else layer.parameters():
                p.writes = 2  # type: ignore[attr-defined]

    def forward(self, x_BSD: Tensor, ctx: Context, pre: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`pre` is applied to x first. Under selective recompute activations are formed again, routing never."""
        x = x_BSD if pre is None else pre(x_BSD)
        self.experts.recompute = self.recompute
        routing = self.router(x, ctx)
        parts = halves(x, routing) if self.in_halves else [(x, routing)]
        sent = self.dispatcher.dispatch(parts)
        shared = [self._shared(parts[0][0])]  # while the tokens are on their way
        sent = [self._visit(part) for part in sent]  # while those of the other half are
        shared += [self._shared(half) for half, _ in parts[1:]]  # while the last results are
        if self.unasked is not None:
            return torch.empty_like(x)
        ys = [self.dispatcher.combine(part) for part in sent]
        return whole([y if s is None else y + s for y, s in zip(ys, shared, strict=True)], x)

    def _visit(self, sent: Sent) -> Sent:
        """Rows at their experts, and on their way back."""
        here = self.dispatcher.arrive(sent)
        y = self.experts(here.rows_ND, here.weights_N, here.counts_E)
        return here if self.unasked is not None else self.dispatcher.send_back(y, here)

    def _shared(self, x_BSD: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        self.shared.recompute = self.recompute  # type: ignore[assignment]
        y: Tensor = self.shared(x_BSD)
        return y if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_BSD)) * y


def expert_block(
    cfg: Any, layer: int, attention: Any, gate: Gate | None = None, bias: bool = False, name: str = ""
) -> PreNormBlock:
    """A pre-norm block with RMSNorm: of a model that has experts in some blocks and a gated MLP in the others.

    `name`: of a block like number `layer` that stands elsewhere.
    """
    d, name = cfg.hidden_size, name or f"layers.{layer}"
    norms = RMSNorm(d, cfg.norm_epsilon), RMSNorm(d, cfg.norm_epsilon)
    if cfg.has_experts(layer):
        return ExpertBlock(norms, attention, MoE(cfg, d, name, gate, bias), cfg.hidden_dropout, name)
    return PreNormBlock(norms, attention, GatedMLP(d, cfg.ffn), cfg.hidden_dropout, name)
