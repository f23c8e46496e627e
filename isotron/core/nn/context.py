"""What every block of one forward pass shares: the batch, and what is computed from it once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isotron.core.batch import Batch


@dataclass
class Context:
    """`rope`: (cos, sin) of the batch's positions, for families that rotate. `mask_BSS`: True where a query may attend,
    beyond causality; None when documents are not isolated."""

    batch: Batch
    rope: tuple[Tensor, Tensor] | None = None

    @property
    def mask_BSS(self) -> Tensor | None:
        """[B, S, S]: same document."""
        docs = self.batch.doc_ids
        return None if docs is None else docs[:, :, None] == docs[:, None, :]
