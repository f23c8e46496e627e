"""One microbatch of token sequences: the same object on every pipeline stage and every tensor-parallel rank.

B sequences, S positions. A token's loss counts `loss_mask` times; `labels` are already shifted (label i is the token
after token i). `doc_ids` is None unless documents in a row must not see each other. `sample_ids` is the place of each
sequence in consumption order over the whole run; dropout masks are keyed by it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Batch:
    """tokens_BS labels_BS positions_BS doc_ids_BS sample_ids_B: int64. loss_mask_BS: float32."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    sample_ids: torch.Tensor
    doc_ids: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in own.items() if v is not None})

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[0], self.tokens.shape[1]
