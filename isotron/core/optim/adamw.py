"""AdamW on the rows that this rank steps, with float32 (or wider) masters.

One fused pass over memory updates masters and moments; unscaling and clipping are a factor inside it. When weights are
already as wide as the gradients they are their own masters. Source: Loshchilov & Hutter 2019, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isotron.core.layout import Box
from isotron.core.optim.config import OptimConfig
from isotron.core.parallel.data import View

KINDS = ("master", "exp_avg", "exp_avg_sq")


class AdamW:
    """Optimizer state of the given views. `updates` counts applied steps and is part of the state."""

    def __init__(self, views: Sequence[View], cfg: OptimConfig) -> None:
        self.views, self.cfg = list(views), cfg
        self.updates = 0
        same = all(v.weight.dtype == v.grad.dtype for v in self.views)
        self.own_masters = not same
        self.state: dict[str, list[Tensor]] = {
            "exp_avg": [torch.zeros_like(v.grad) for v in self.views],
            "exp_avg_sq": [torch.zeros_like(v.grad) for v in self.views],
            "master": [v.weight if same else v.weight.to(v.grad.dtype) for v in self.views],
        }

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, gradient_factor: float) -> None:
        """One update with gradients x gradient_factor; then weights are the rounded masters."""
        for decays in (True, False):
            chosen = [i for i, v in enumerate(self.views) if v.placed.rule.decay is decays]
            if chosen:
                self._update(chosen, lr, weight_decay if decays else 0.0, gradient_factor)
        self.updates += 1
        if self.own_masters:
            self.round_masters()

    def _update(self, chosen: list[int], lr: float, weight_decay: float, factor: float) -> None:
        device = self.views[chosen[0]].grad.device
        steps = torch.full((len(chosen),), float(self.updates), device=device).unbind()
        scale = None if factor == 1.0 else torch.tensor(1.0 / factor, dtype=torch.float64, device=device).float()
        adamw(
            [self.state["master"][i] for i in chosen],
            [self.views[i].grad for i in chosen],
            [self.state["exp_avg"][i] for i in chosen],
            [self.state["exp_avg_sq"][i] for i in chosen],
            [],
            list(steps),
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=self.cfg.adam_beta1,
            beta2=self.cfg.adam_beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.cfg.adam_eps,
            maximize=False,
        )

    @torch.no_grad()
    def round_masters(self) -> None:
        """Weights from masters."""
        torch._foreach_copy_([v.weight for v in self.views], self.state["master"])

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters from weights: after loading weights alone."""
        if self.own_masters:
            torch._foreach_copy_(self.state["master"], [v.weight for v in self.views])

    def pieces(self, owned: bool = True) -> Iterator[tuple[str, View, list[tuple[Box, Tensor]]]]:
        """(kind/name, view, [(global box, tensor)]) of all state; masters only when they are not the weights."""
        for kind in KINDS:
            if kind == "master" and not self.own_masters:
                continue
            for view, tensor in zip(self.views, self.state[kind], strict=True):
                yield f"{kind}/{view.placed.name}", view, list(view.pieces(tensor, owned))
