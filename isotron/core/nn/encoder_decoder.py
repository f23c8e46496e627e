"""A run of the blocks of an encoder and of the decoder behind it: a whole model, or one pipeline stage of it.

Legend: B batch, S the decoder's sequence, E the encoder's (their local parts under sequence parallelism), D hidden.

Blocks are numbered through, the encoder's first. Up to the encoder's last block stages hand on one tensor, `memory`,
then two: `hidden`, and `memory` as it is, which every stage of the decoder looks at; the last block's leaves `hidden`
alone. A stage may hold blocks of both. Both sequences are embedded with the same weights, on whatever stages begin with
them, and the bias of an encoder or decoder is one table on all its stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.nn.context import Context
from isotron.core.nn.cross import Streams
from isotron.core.nn.decoder import Boundary, Decoder, Terms


class EncoderDecoder(Decoder):
    """`split`: behind how many blocks the encoder ends, and how many there are in all. `layers`: those held here.
    `first`: whether this stage begins with the encoder's tokens.

    Ends, where the stage has them: embed, dropout, encoder_bias, encoder_norm, decoder_dropout, decoder_bias, norm,
    head.
    """

    encoder_bias: nn.Module
    encoder_norm: nn.Module
    decoder_bias: nn.Module
    decoder_dropout: nn.Module

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        ends: Mapping[str, nn.Module],
        split: tuple[int, int],
        layers: range,
        first: bool,
    ) -> None:
        super().__init__(blocks, lambda batch, dtype: Context(batch), ends)
        self.split, self.held, self.first = split, layers, first

    def unit_names(self) -> list[str]:
        """In the order of use; the decoder's tokens are embedded behind the encoder, with what came first then."""
        middle = self.split[0]
        encoder = [f"layers.{i}" for i in self.held if i < middle]
        decoder = [f"layers.{i}" for i in self.held if i >= middle]
        order = ("embed", "encoder_bias", *encoder, "encoder_norm", "decoder_bias", *decoder, "norm", "head")
        return [name for name in order if name in self.ends or name.startswith("layers.")]

    def hands_on(self, batch: Batch, done: int) -> dict[str, int]:
        """Name -> tokens of a row of each tensor that crosses a boundary behind `done` blocks of the model."""
        middle, every = self.split
        found = {"memory": source_of(batch)[0].shape[1]} if done < every else {}
        return {**found, "hidden": batch.shape[1]} if done > middle else found

    def hidden(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Tensor:
        """What the final norm takes; on the last stage."""
        return self.carried(batch, boundary, terms)["hidden"]

    def carried(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Boundary:
        """What crosses the boundary behind this stage: `memory`, `hidden` or both."""
        found, (source_BE, unseen_B11E), middle = dict(boundary), source_of(batch), self.split[0]
        blocks = list(self.layers.items())
        encoder = [block for block in blocks if int(block[0]) < middle]
        if self.first:
            found["memory"] = self.dropout(self._embedded(source_BE), batch.sample_ids)
        if encoder:
            ctx = Streams(batch, bias_HST=self._bias("encoder_bias", source_BE), unseen_B11E=unseen_B11E)
            found["memory"] = self._through_blocks(found["memory"], ctx, encoder)
        if "encoder_norm" in self.ends:
            found["memory"] = self._through("encoder_norm", found["memory"], self.encoder_norm)
        if "decoder_dropout" in self.ends:
            found["hidden"] = self.decoder_dropout(self._embedded(batch.tokens), batch.sample_ids)
        if len(encoder) < len(blocks):
            bias_HST = self._bias("decoder_bias", batch.tokens)
            ctx = Streams(batch, bias_HST=bias_HST, unseen_B11E=unseen_B11E, memory_BED=found["memory"])
            found["hidden"] = self._through_blocks(found["hidden"], ctx, blocks[len(encoder) :], len(encoder))
        return {name: found[name] for name in self.hands_on(batch, self.held.stop)}

    def further(self, batch: Batch, done: int, hidden: Tensor | None) -> Tensor:
        """What one more token of each row becomes on this stage, behind `done` of them; blocks remember those. The
        stage that begins with the decoder's tokens takes nothing.
        """
        x = self._embedded(batch.tokens) if hidden is None else hidden
        positions_T = torch.arange(done + 1, device=batch.tokens.device)
        unseen_B11E = source_of(batch)[1]
        ctx = Streams(batch, bias_HST=self.decoder_bias(positions_T, queries=1), unseen_B11E=unseen_B11E)
        return self._through_blocks(x, ctx, [b for b in self.layers.items() if int(b[0]) >= self.split[0]])

    def _embedded(self, ids_BS: Tensor) -> Tensor:
        x = self._through("embed", ids_BS, self.embed)
        return x if self.widths is None else x.to(self.widths[0])

    def _bias(self, name: str, ids_BS: Tensor) -> Tensor:
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        return self._through(name, positions_S, getattr(self, name))


def source_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The encoder's tokens [B, E], and True at their padding [B, 1, 1, E]."""
    if batch.source is None or batch.source_lengths is None:
        raise ValueError("a batch without a source, which an encoder reads")
    places_E = torch.arange(batch.source.shape[1], device=batch.source.device)
    return batch.source, (places_E >= batch.source_lengths[:, None])[:, None, None]
