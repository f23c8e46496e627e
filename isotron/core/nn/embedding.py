"""Token and position embeddings.

Legend: B batch, S sequence, D hidden, V vocabulary rows held here. Sockets of the token embedding: `first`, the global
id of the first row held (ids outside the held rows give zero), and `leave`, which adds up the ranks' parts. Socket of
both: `sequence` = (index, count), the local slice of the sequence after `leave`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.nn.linear import Socket, sink_of


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, w: Tensor, first: int, real: int, leave: Any) -> Tensor:
        ctx.leave, ctx.sink, ctx.shape, ctx.dtype = leave, sink_of(w), w.shape, w.dtype
        if leave is None:
            ctx.save_for_backward(ids, None)
            return nn.functional.embedding(ids, w[:real])
        local = ids - first
        outside = (local < 0) | (local >= real)
        local = local.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside[..., None])
        return leave.forward(nn.functional.embedding(local, w).masked_fill_(outside[..., None], 0)).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        local, outside = ctx.saved_tensors
        if ctx.leave is not None:
            dy = ctx.leave.backward(dy).wait().masked_fill(outside, 0)
        index, rows = local.flatten(), dy.reshape(-1, dy.shape[-1])
        if ctx.sink is not None:
            ctx.sink.add_rows(index, rows)
            return None, None, None, None, None
        dw = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dy.device).index_add_(0, index, rows)
        return None, dw, None, None, None


def looked_up(ids: Tensor, w_VD: Tensor) -> Tensor:
    """w_VD[ids], [*ids.shape, D], of a table that every rank holds all rows of."""
    return _Lookup.apply(ids, w_VD, 0, w_VD.shape[0], None)


class Embedding(nn.Module):
    """scale * W_VD[ids]; the scale is rounded to the type of the weights first."""

    def __init__(self, rows: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))
        self.scale = scale
        self.first = 0
        self.real = rows
        self.leave: Socket | None = None

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S, D], or the local part of S."""
        x = _Lookup.apply(ids_BS, self.weight, self.first, self.real, self.leave)
        return x if self.scale == 1.0 else x * float(torch.tensor(self.scale, dtype=x.dtype))


class Positions(nn.Module):
    """Learned positions (or types of tokens), added to the local part of the sequence."""

    def __init__(self, longest: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(longest, size))
        self.sequence: tuple[int, int] = (0, 1)

    def forward(self, positions_BS: Tensor) -> Tensor:
        """[B, S, D] for the local part of S."""
        index, count = self.sequence
        local = positions_BS.chunk(count, dim=1)[index] if count > 1 else positions_BS
        return looked_up(local, self.weight)
