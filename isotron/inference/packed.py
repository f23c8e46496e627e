"""Copies of weights in the order in which a CPU's matrix products read them.

A product of a few rows with a large matrix spends most of its time putting the matrix in order, each time anew. While
an engine is open its weights do not change, so they are put in order once. The copies take as much memory as the
weights; where that is more than half of what is free, there are none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import linear

from isotron.core.device import has_packed_products
from isotron.core.host import available_memory

ROWS = 8  # for products of which the order is chosen: best from 4 to 64 rows, and no worse for more
FEWEST = 4  # rows: up to three cost what one does, in either order
TRIES = 3  # products after which a copy is made: it costs what it saves in about so many


def worthwhile(weights: Iterable[Tensor]) -> bool:
    """Whether there is room for copies of these."""
    need = sum(w.nbytes for w in weights)
    free = available_memory()
    return free is None or 2 * need <= free


class Product:
    """x_...I, bias -> x W^T + bias; `packed`: with a copy of W where the device has such products, once it pays."""

    def __init__(self, weight_OI: Tensor, packed: bool) -> None:
        self.weight = weight_OI.detach()
        self.copy: Tensor | None = None
        fits = packed and weight_OI.numel() > 0 and has_packed_products(weight_OI.device, weight_OI.dtype)
        self.left = TRIES if fits else -1

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y_...O."""
        if self.left < 0 or x.numel() < FEWEST * x.shape[-1]:
            return linear(x, self.weight, bias)
        if self.left:
            self.left -= 1
            return linear(x, self.weight, bias)
        if self.copy is None:
            self.copy = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), ROWS)
        return torch.ops.mkldnn._linear_pointwise(x, self.copy, bias, "none", [], "")  # type: ignore[no-any-return]
