"""A run of decoder blocks: a whole model, or one pipeline stage of it.

Legend: B batch, S sequence (its local part under sequence parallelism), D hidden.

The first stage embeds, the last one has the final norm and the head; parameter names carry global layer numbers, so a
stage is built for its range of layers and never carved out of a whole model. A boundary between stages is a dict of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isotron.core.batch import Batch
from isotron.core.nn.context import Context
from isotron.core.nn.loss import Head

Boundary = dict[str, Tensor]
Terms = dict[str, tuple[Tensor, float]]


class Decoder(nn.Module):
    """Blocks with what stands before and after them on this stage.

    `recompute`: "none", "selective" (blocks decide) or "full" (units of `recompute_layers` blocks keep their input
    only).
    """

    embed: nn.Module
    positions: nn.Module
    dropout: nn.Module
    norm: nn.Module
    head: Head

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        context: Callable[[Batch, Any], Context],
        ends: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.ends = frozenset(ends)
        for name, module in ends.items():
            self.add_module(name, module)
        self.layers = nn.ModuleDict({str(i): b for i, b in blocks.items()})
        self._context = context
        self.recompute, self.recompute_layers = "none", 1

    @property
    def is_first(self) -> bool:
        """Whether it starts from token ids."""
        return "embed" in self.ends

    @property
    def is_last(self) -> bool:
        """Whether it ends in logits and loss."""
        return "head" in self.ends

    def hidden(self, batch: Batch, boundary: Boundary) -> Tensor:
        """x_BSD after this stage's blocks."""
        x = boundary["hidden"] if not self.is_first else self.start(batch)
        ctx = self._context(batch, x.dtype)
        blocks = list(self.layers.values())
        if self.recompute != "full" or not self.training:
            return _chain(x, blocks, ctx)
        for i in range(0, len(blocks), self.recompute_layers):
            unit = blocks[i : i + self.recompute_layers]
            x = checkpoint(_chain, x, unit, ctx, use_reentrant=False, preserve_rng_state=False)
        return x

    def start(self, batch: Batch) -> Tensor:
        """Embedded tokens, with learned positions and dropout where the family has them."""
        x = self.embed(batch.tokens)
        if "positions" in self.ends:
            x = x + self.positions(batch.positions)
        return self.dropout(x, batch.sample_ids)

    def forward(self, batch: Batch, boundary: Boundary, weight: float) -> tuple[Boundary, Terms]:
        """The next boundary and the terms of the loss: name -> (sum over tokens, its weight in the loss)."""
        x = self.hidden(batch, boundary)
        if not self.is_last:
            return {"hidden": x}, {}
        loss = self.head(self.norm(x), batch.labels, batch.loss_mask, weight)
        return {}, {"loss": (loss, weight)}

    def logits(self, batch: Batch, boundary: Boundary) -> tuple[Boundary, Tensor | None]:
        """The next boundary, and on the last stage the logits of the vocabulary rows held here."""
        x = self.hidden(batch, boundary)
        return ({"hidden": x}, None) if not self.is_last else ({}, self.head.logits(self.norm(x)))


def _chain(x: Tensor, blocks: list[nn.Module], ctx: Context) -> Tensor:
    for block in blocks:
        x = block(x, ctx)
    return x
