"""A run of the blocks of an image tower and of the decoder behind it: a whole model, or one pipeline stage of it.

Legend: B batch, S sequence, D hidden; I pictures of a batch, P patches of a picture, V width of the tower.

Blocks are numbered through, the tower's first. Up to its last block stages hand on `image` [I, 1 + P, V]; behind it
that is [I, P, D]; then `hidden` [B, S, D], into which the pictures went. How many pictures a microbatch has is its own
affair. A stage may hold blocks of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.nn.context import Context
from isotron.core.nn.decoder import Boundary, Decoder, Terms


class ImageDecoder(Decoder):
    """`split`: behind how many blocks the tower ends, and how many there are in all. `layers`: those held here.
    `first`: whether this stage begins with the pictures. `sizes`: patches of a picture, V and D. `mark`: the token that
    stands for a patch.

    Ends, where the stage has them: vision, projector, embed, norm, head.
    """

    vision: nn.Module
    projector: nn.Module

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        context: Callable[[Batch, Any], Context],
        ends: Mapping[str, nn.Module],
        split: tuple[int, int],
        layers: range,
        first: bool,
        sizes: tuple[int, int, int],
        mark: int,
    ) -> None:
        super().__init__(blocks, context, ends)
        self.split, self.held, self.first, self.sizes, self.mark = split, layers, first, sizes, mark

    def unit_names(self) -> list[str]:
        """In the order of use."""
        middle = self.split[0]
        tower = [f"layers.{i}" for i in self.held if i < middle]
        decoder = [f"layers.{i}" for i in self.held if i >= middle]
        order = ("vision", *tower, "projector", "embed", *decoder, "norm", "head")
        return [name for name in order if name in self.ends or name.startswith("layers.")]

    def hands_on(self, batch: Batch, done: int) -> dict[str, int | tuple[int, ...]]:
        """Name -> shape, or tokens of a row, of what crosses a boundary behind `done` blocks of the model."""
        middle, (patches, narrow, wide) = self.split[0], self.sizes
        if done > middle:
            return {"hidden": batch.shape[1]}
        count = len(images_of(batch))
        return {"image": (count, patches, wide) if done == middle else (count, 1 + patches, narrow)}

    def hidden(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Tensor:
        """What the final norm takes; on the last stage."""
        return self.carried(batch, boundary, terms)["hidden"]

    def carried(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Boundary:
        """What crosses the boundary behind this stage: `image`, or `hidden`."""
        found, middle, blocks = dict(boundary), self.split[0], list(self.layers.items())
        tower = [block for block in blocks if int(block[0]) < middle]
        if self.first:
            found["image"] = self._through("vision", images_of(batch), self.vision)
        if tower:
            found["image"] = self._through_blocks(found["image"], Context(_pictures(batch)), tower)
        if "projector" in self.ends:
            found["image"] = self._through("projector", found["image"], self.projector)
        if "embed" in self.ends:
            text = self._through("embed", batch.tokens, self.embed)
            found["hidden"] = self._with_pictures(batch.tokens, text, found["image"])
        if len(tower) < len(blocks):
            ctx = self._context(batch, found["hidden"].dtype)
            found["hidden"] = self._through_blocks(found["hidden"], ctx, blocks[len(tower) :], len(tower))
        return {name: found[name] for name in self.hands_on(batch, self.held.stop)}

    def _with_pictures(self, tokens_BS: Tensor, x_BSD: Tensor, image_IPD: Tensor) -> Tensor:
        """The text with a vector of a picture at every mark, in order."""
        marks_BS = tokens_BS == self.mark
        if int(marks_BS.sum()) != image_IPD.shape[0] * image_IPD.shape[1]:
            raise ValueError(
                f"a batch with {int(marks_BS.sum())} tokens {self.mark} for pictures, and "
                f"{image_IPD.shape[0]} pictures of {image_IPD.shape[1]} patches"
            )
        return x_BSD.masked_scatter(marks_BS[..., None], image_IPD.to(x_BSD.dtype))


def images_of(batch: Batch) -> Tensor:
    """The pictures of a batch [I, P, C], in the order in which its rows have them."""
    if batch.images is None:
        raise ValueError("a batch without pictures, which a tower reads")
    return batch.images


def _pictures(batch: Batch) -> Batch:
    """The same as rows of a tower: every patch sees every other."""
    images = images_of(batch)
    numbers = torch.arange(len(images), device=images.device)
    return replace(batch, sample_ids=numbers, doc_ids=None, part=None, origin=None)
