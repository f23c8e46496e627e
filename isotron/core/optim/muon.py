"""Muon: momentum, made orthogonal as one whole matrix whatever the layout, then a step of fixed length.

Momentum lives in the same cut as every other optimizer state. Each step, the pieces of a matrix travel to the rank
that it is dealt to, Newton-Schulz runs there on the whole, and the pieces of the result travel back to all holders.
So the result is the same in every layout, and copies stay bitwise equal. Source: Jordan et al. 2024; the scale modes
are those of Megatron's emerging optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.layout import Box
from isotron.core.mesh import Group
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.matrices import Matrix, rounds
from isotron.core.optim.method import Shared, Todo
from isotron.core.optim.newton_schulz import length, orthogonalised
from isotron.core.optim.spread import dealt, held
from isotron.core.parallel.data import View

BUDGET = 1 << 26  # elements of whole matrices on a rank at a time
Pieces = dict[tuple[str, Box], Tensor]


class Muon:
    """`group`: every rank that holds a part of the same parameters (one pipeline stage's tensor and data axes).

    `like`: an empty tensor of the masters' type and device, for a rank without views.
    """

    states: tuple[str, ...] = ("momentum",)
    together = True

    def __init__(
        self, cfg: OptimConfig, views: Sequence[View], group: Group, like: Tensor, budget: int = BUDGET
    ) -> None:
        self.cfg, self.group, self.like = cfg, group, like
        self.rounds = rounds(dealt(views, group), group.size, budget)

    def shared(self) -> Iterable[Shared]:
        """Nothing."""
        return ()

    def update(self, todo: Todo) -> None:
        """Collective over the group."""
        mu = self.cfg.muon_momentum
        momentum, new = todo.states["momentum"], (1 - mu) * todo.factor
        if todo.views:
            torch._foreach_mul_(momentum, mu)
            torch._foreach_add_(momentum, todo.grads, alpha=new)
        steps = [m.clone() for m in momentum]
        if self.cfg.muon_nesterov and steps:
            torch._foreach_mul_(steps, mu)
            torch._foreach_add_(steps, todo.grads, alpha=new)
        self._orthogonalise(todo.views, steps)
        for master, step, lr, decay in zip(todo.masters, steps, todo.lrs, todo.decays, strict=True):
            master.mul_(1 - lr * decay).sub_(step, alpha=lr)

    def _orthogonalise(self, views: Sequence[View], steps: list[Tensor]) -> None:
        """Replace each matrix among `steps`, spread over the group, by its orthogonal factor of the right length."""
        mine: Pieces = {}
        for view, step in zip(views, steps, strict=True):
            mine.update({(view.placed.name, box): piece for box, piece in held(view, step)})
        for matrices in self.rounds:
            self._round(matrices, mine)

    def _round(self, matrices: list[Matrix], mine: Pieces) -> None:
        there = [(rank, m.owner, m, box) for m in matrices for rank, box in m.sources]
        back = [(m.owner, rank, m, box) for m in matrices for rank, box in m.holders]
        arrived = self._move(there, lambda m, box: mine[m.name, box])
        results: dict[Matrix, Tensor] = {}
        for m in matrices:
            if m.owner == self.group.index:
                whole = self.like.new_empty(m.box.shape)
                for _, box in m.sources:
                    whole[box.relative_to(m.box).slices()] = arrived[m.name, box]
                scale = length(self.cfg.muon_scale_mode, *m.box.shape) * self.cfg.muon_extra_scale_factor
                results[m] = orthogonalised(whole, self.cfg.muon_ns_steps).mul_(scale)
        moved = self._move(back, lambda m, box: results[m][box.relative_to(m.box).slices()])
        for place, piece in moved.items():
            mine[place].copy_(piece)

    def _move(self, items: list[tuple[int, int, Matrix, Box]], pick: Any) -> Pieces:
        """One exchange of boxes, (from, to, matrix, box) in an order that all ranks share; what arrived here."""
        ranks, here = range(self.group.size), self.group.index
        out = [[(m, box) for a, b, m, box in items if a == here and b == rank] for rank in ranks]
        into = [[(m, box) for a, b, m, box in items if b == here and a == rank] for rank in ranks]
        filled = [pick(m, box).reshape(-1) for run in out for m, box in run]
        flat = torch.cat(filled) if filled else self.like
        sizes = [[sum(box.size for _, box in run) for run in runs] for runs in (out, into)]
        received = comm.start_all_to_all(flat, sizes[0], sizes[1], self.group).wait()
        boxes = [(m.name, box) for run in into for m, box in run]
        cut = received.split([box.size for _, box in boxes]) if boxes else ()
        return {(name, box): piece.view(box.shape) for (name, box), piece in zip(boxes, cut, strict=True)}
