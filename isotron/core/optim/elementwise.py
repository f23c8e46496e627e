"""Update rules that treat every element alone: AdamW, Adam, SGD with momentum, Lion.

Sources: Loshchilov & Hutter 2019, algorithm 2 (AdamW); Kingma & Ba 2015, algorithm 1, with torch's L2 term (adam_l2);
Sutskever et al. 2013 in torch's form (sgd); Chen et al. 2023, algorithm 2 (lion).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from isotron.core.optim.config import OptimConfig
from isotron.core.optim.method import Shared, Todo

BLOCK = 1 << 15  # elements that stay in a core's cache from pass to pass; more would be cut over threads


class Elementwise:
    """All its state is that of single parameters, and no rank waits for another."""

    together = False

    def shared(self) -> Iterable[Shared]:
        """Nothing."""
        return ()


class Adam(Elementwise):
    """One fused pass over memory; unscaling and clipping are a factor inside it."""

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, cfg: OptimConfig, decoupled: bool) -> None:
        self.cfg, self.decoupled = cfg, decoupled

    def update(self, todo: Todo) -> None:
        """Weight decay is applied to the weights when `decoupled` (AdamW), else added to the gradient."""
        rule = adamw if self.decoupled else adam
        for part in todo.alike():
            device = part.grads[0].device
            steps = torch.full((len(part.views),), float(part.updates), device=device).unbind()
            rule(
                part.masters,
                part.grads,
                part.states["exp_avg"],
                part.states["exp_avg_sq"],
                [],
                list(steps),
                fused=True,
                grad_scale=inverse(part.factor, device),
                amsgrad=False,
                beta1=self.cfg.adam_beta1,
                beta2=self.cfg.adam_beta2,
                lr=part.lrs[0],
                weight_decay=part.decays[0],
                eps=self.cfg.adam_eps,
                maximize=False,
            )


class SGD(Elementwise):
    """Momentum adds up gradients undamped, weight decay is part of the gradient: torch's and Megatron's form."""

    def __init__(self, cfg: OptimConfig) -> None:
        self.momentum = cfg.sgd_momentum
        self.states: tuple[str, ...] = ("momentum",) if self.momentum else ()

    def update(self, todo: Todo) -> None:
        """A momentum that is zero at first is torch's, which begins with the first gradient."""
        for part in todo.alike():
            buffers: list[Tensor | None] = list(part.states["momentum"]) if self.momentum else [None] * len(part.views)
            sgd(
                part.masters,
                part.grads,
                buffers,
                fused=True,
                grad_scale=inverse(part.factor, part.grads[0].device),
                weight_decay=part.decays[0],
                momentum=self.momentum,
                lr=part.lrs[0],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )


class Lion(Elementwise):
    """The sign of a mix of momentum and gradient; weight decay decoupled."""

    states: tuple[str, ...] = ("momentum",)

    def __init__(self, cfg: OptimConfig) -> None:
        self.beta1, self.beta2 = cfg.lion_beta1, cfg.lion_beta2

    def update(self, todo: Todo) -> None:
        """Several passes over memory: on a CPU block by block, so that all but the first find theirs in its cache."""
        for part in todo.alike():
            if part.masters[0].device.type != "cpu":
                self._in_passes(part)
                continue
            for all_of in zip(part.masters, part.grads, part.states["momentum"], strict=True):
                direction = torch.empty(min(BLOCK, all_of[0].numel()), dtype=all_of[0].dtype)
                for w, g, m in zip(*(x.view(-1).split(BLOCK) for x in all_of), strict=True):
                    c = torch.mul(m, self.beta1, out=direction[: len(m)])
                    c.add_(g, alpha=(1 - self.beta1) * part.factor).sign_()
                    w.mul_(1 - part.lrs[0] * part.decays[0]).add_(c, alpha=-part.lrs[0])
                    m.mul_(self.beta2).add_(g, alpha=(1 - self.beta2) * part.factor)

    def _in_passes(self, part: Todo) -> None:
        """Over lists of tensors; one temporary of the size of the masters."""
        lr, momentum = part.lrs[0], part.states["momentum"]
        direction = torch._foreach_mul(momentum, self.beta1)
        torch._foreach_add_(direction, part.grads, alpha=(1 - self.beta1) * part.factor)
        torch._foreach_sign_(direction)
        torch._foreach_mul_(part.masters, 1 - lr * part.decays[0])
        torch._foreach_add_(part.masters, direction, alpha=-lr)
        torch._foreach_mul_(momentum, self.beta2)
        torch._foreach_add_(momentum, part.grads, alpha=(1 - self.beta2) * part.factor)


def inverse(factor: float, device: torch.device) -> Tensor | None:
    """What torch's fused kernels divide gradients by."""
    return None if factor == 1.0 else torch.tensor(1.0 / factor, dtype=torch.float64, device=device).float()
