"""What every block of one forward pass shares: the batch, and what is computed from it once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isotron.core.batch import Batch


@dataclass
class Context:
    """`rope`: (cos, sin) of the batch's positions, for families that rotate; `local_rope`: those of blocks that attend
    over a window, where they have a base of their own.

    `terms`: where blocks leave their terms of the loss, name -> (sum, its weight in the loss); None when nobody asks.
    A term counted over sequences enters the loss with `sequence_weight` times its factor.
    """

    batch: Batch
    rope: tuple[Tensor, Tensor] | None = None
    terms: dict[str, tuple[Tensor, float]] | None = None
    sequence_weight: float = 0.0
    local_rope: tuple[Tensor, Tensor] | None = None
