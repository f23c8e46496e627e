"""One gradient norm for the whole model, each logical parameter counted once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import Group
from isotron.core.parallel.data import View

BLOCK = 512


def global_norm(views: Sequence[View], world: Group, scale: float = 1.0, device: torch.device | None = None) -> float:
    """L2 norm of all gradients / scale, the same on every rank; inf or NaN when any gradient is.

    `device`: of the model, for a rank that has no views.
    """
    there = views[0].grad.device if views and device is None else device
    total = torch.zeros((), dtype=torch.float64, device=there)
    parts = [sum_of_squares(grad).to(there) for view in views if view.counts for _, grad in view.pieces(view.grad)]
    total = torch.stack(parts).sum() if parts else total
    return float(comm.all_reduce(total, world).sqrt()) / scale


def sum_of_squares(x: Tensor) -> Tensor:
    """In float64, from short float32 sums: one long float32 sum of millions is off by parts in a thousand on a CPU."""
    flat, wide = x.reshape(-1), torch.promote_types(x.dtype, torch.float32)
    rows, rest = flat[: len(flat) // BLOCK * BLOCK].view(-1, BLOCK), flat[len(flat) // BLOCK * BLOCK :]
    sums = torch.linalg.vector_norm(rows, dim=1, dtype=wide).double().square().sum()
    return sums + torch.linalg.vector_norm(rest, dtype=wide).double().square()


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied with so that their norm is at most `limit`; 1 when limit is 0."""
    return 1.0 if limit <= 0 else min(1.0, limit / (norm + 1e-6))
