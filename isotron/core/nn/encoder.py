"""A run of encoder blocks: a whole model, or one pipeline stage of it.

Legend: B batch, S sequence (its local part under sequence parallelism), D hidden.

The first stage adds words, positions and types of tokens; the last one has a layer with an activation before the norm
and the output layer, which say for every token what it was. Which tokens count, and which see each other, is the
batch's affair.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.nn.context import Context
from isotron.core.nn.decoder import Boundary, Decoder, Terms
from isotron.core.nn.mlp import ACTIVATIONS


class Encoder(Decoder):
    """Ends, where the stage has them: embed, positions, types, embed_norm, dropout; final_norm, transform, norm, head.

    `activation`: behind `transform`.
    """

    types: nn.Module
    embed_norm: nn.Module
    final_norm: nn.Module
    transform: nn.Module

    def __init__(self, blocks: Mapping[int, nn.Module], ends: Mapping[str, nn.Module], activation: str) -> None:
        super().__init__(blocks, lambda batch, dtype: Context(batch), ends)
        self.activation = ACTIVATIONS[activation]

    def unit_names(self) -> list[str]:
        """In the order of use."""
        before, behind = ("embed", "positions", "types", "embed_norm"), ("final_norm", "transform", "norm", "head")
        blocks = (f"layers.{number}" for number in self.layers)
        return [*(n for n in before if n in self.ends), *blocks, *(n for n in behind if n in self.ends)]

    def looked_up(self, batch: Batch) -> Tensor:
        """Words, positions and types; tokens of a batch without types are all of the first."""
        types_BS = torch.zeros_like(batch.tokens) if batch.types is None else batch.types
        x = super().looked_up(batch) + self._through("types", types_BS, self.types)
        return self._through("embed_norm", x, self.embed_norm) if "embed_norm" in self.ends else x

    def hidden(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Tensor:
        """x_BSD after this stage's blocks; on the last stage what the norm before the output layer takes."""
        x = super().hidden(batch, boundary, terms)
        if "final_norm" in self.ends:
            x = self._through("final_norm", x, self.final_norm)
        return self._through("transform", x, self._transformed) if "transform" in self.ends else x

    def _transformed(self, x_BSD: Tensor) -> Tensor:
        return self.activation(self.transform(x_BSD))
