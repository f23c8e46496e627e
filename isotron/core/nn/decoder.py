"""A run of decoder blocks: a whole model, or one pipeline stage of it.

Legend: B batch, S sequence (its local part under sequence parallelism), D hidden.

The first stage embeds, the last one has the final norm and the head; parameter names carry global layer numbers, so a
stage is built for its range of layers and never carved out of a whole model. A boundary between stages is a dict of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isotron.core.batch import Batch
from isotron.core.nn.block import again
from isotron.core.nn.context import Context
from isotron.core.nn.loss import Head
from isotron.core.nn.scores import label_scores

Boundary = dict[str, Tensor]
Terms = dict[str, tuple[Tensor, float]]
Offloading = Callable[[int, Iterable[nn.Module], Context], AbstractContextManager[Any]]


class _Unasked(Terms):
    """Where terms go that are formed again in the backward: they were reported already, and kept they would keep
    the graph that keeps them.
    """

    def __setitem__(self, name: str, term: tuple[Tensor, float]) -> None:
        """Nothing."""


def _stay(place: int, modules: Iterable[nn.Module], ctx: Context) -> AbstractContextManager[Any]:
    """Nothing is offloaded."""
    return nullcontext()


class Around(Protocol):
    """What happens to an activation on its way into and out of a unit: a block, or a module at an end of the stage."""

    def enter(self, name: str, x: Tensor) -> Tensor:
        """x, when the unit can run."""
        ...

    def leave(self, name: str, y: Tensor) -> Tensor:
        """y, when the unit has run."""
        ...


class Decoder(nn.Module):
    """Blocks with what stands before and after them on this stage.

    `recompute`: "none", "selective" (blocks decide) or "full": units of `recompute_layers` blocks keep their input
    only, or, by the method "block", the first `recompute_layers` blocks do. Socket `keeping`: a context in which a
    unit's input is kept. Socket `offloading`: one in which whatever a unit keeps is kept elsewhere. Socket `around`:
    brings weights that are not kept here, unit by unit.
    """

    embed: nn.Module
    positions: nn.Module
    dropout: nn.Module
    norm: nn.Module
    head: Head
    mtp_embed: nn.Module
    mtp: nn.Module

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
        self.recompute, self.recompute_layers, self.recompute_method = "none", 1, "uniform"
        self.keeping: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.offloading: Offloading = _stay
        self.sequence_weight = 0.0  # with which a term counted over sequences enters the loss
        self.around: Around | None = None
        self.widths: tuple[torch.dtype, torch.dtype] | None = None  # of a wider residual stream, and of everything else

    def add_ends(self, ends: Mapping[str, nn.Module]) -> None:
        """Further modules before or after the blocks."""
        self.ends |= frozenset(ends)
        for name, module in ends.items():
            self.add_module(name, module)

    @property
    def is_first(self) -> bool:
        """Whether it starts from token ids."""
        return "embed" in self.ends

    @property
    def is_last(self) -> bool:
        """Whether it ends in logits and loss."""
        return "head" in self.ends

    def unit_names(self) -> list[str]:
        """What is gathered and dropped as one under ZeRO-3, in the order of use."""
        before, after = ("embed", "positions"), ("norm", "head", "mtp")
        ends = [[name for name in names if name in self.ends] for names in (before, after)]
        return [*ends[0], *(f"layers.{number}" for number in self.layers), *ends[1]]

    def hands_on(self, batch: Batch, done: int) -> Mapping[str, int | tuple[int, ...]]:
        """Name -> tokens of a row of each tensor that crosses a boundary behind `done` blocks of the model; the whole
        shape of one that is not as many rows as the batch has, as wide as the model.
        """
        return {"hidden": batch.shape[1]}

    def carried(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Boundary:
        """What crosses the boundary behind this stage; on the last one `hidden` is what the final norm takes."""
        return {"hidden": self.hidden(batch, boundary, terms)}

    def hidden(self, batch: Batch, boundary: Boundary, terms: Terms | None = None) -> Tensor:
        """x_BSD after this stage's blocks; their terms of the loss go to `terms`."""
        x = boundary["hidden"] if not self.is_first else self.start(batch)
        ctx = self._context(batch, x.dtype if self.widths is None else self.widths[1])
        ctx.terms, ctx.sequence_weight = terms, self.sequence_weight
        x = self._through_blocks(x, ctx, list(self.layers.items()))
        ctx.terms = None if terms is None else _Unasked()
        return x

    def _through_blocks(self, x: Tensor, ctx: Context, blocks: list[tuple[str, nn.Module]], first: int = 0) -> Tensor:
        """Through some blocks of the stage, from its number `first` on."""
        if self.recompute != "full" or not self.training:
            return self._keep_all(x, blocks, first, ctx)
        size, stop = self.recompute_layers, len(blocks)
        if self.recompute_method == "block":
            size, stop = 1, max(0, min(self.recompute_layers - first, stop))
        for i in range(0, stop, size):
            unit = blocks[i : i + size]
            with self.keeping(), self.offloading(first + i, (b for _, b in unit), ctx):
                x = checkpoint(self._chain, x, unit, ctx, use_reentrant=False, preserve_rng_state=False,
                               context_fn=partial(again, unit[-1][1], x))  # fmt: skip
        return self._keep_all(x, blocks[stop:], first + stop, ctx)

    def _keep_all(self, x: Tensor, blocks: list[tuple[str, nn.Module]], first: int, ctx: Context) -> Tensor:
        """Blocks from number `first` of the stage on, which keep what they need."""
        for place, entry in enumerate(blocks, first):
            with self.offloading(place, (entry[1],), ctx):
                x = self._chain(x, [entry], ctx)
        return x

    def _chain(self, x: Tensor, blocks: list[tuple[str, nn.Module]], ctx: Context) -> Tensor:
        for number, block in blocks:
            x = self._through(f"layers.{number}", x, partial(block, ctx=ctx))
        return x

    def _through(self, name: str, x: Tensor, unit: Callable[[Tensor], Tensor]) -> Tensor:
        """What a unit makes of x, its weights being at hand meanwhile."""
        if self.around is None:
            return unit(x)
        return self.around.leave(name, unit(self.around.enter(name, x)))

    def start(self, batch: Batch) -> Tensor:
        """What the first block takes: embedded tokens, with dropout."""
        return self.dropout(self.looked_up(batch), batch.places)

    def looked_up(self, batch: Batch) -> Tensor:
        """Embedded tokens, with learned positions where the family has them."""
        x = self._through("embed", batch.tokens, self.embed)
        x = x if self.widths is None else x.to(self.widths[0])
        return x + self._through("positions", batch.positions, self.positions) if "positions" in self.ends else x

    def forward(self, batch: Batch, boundary: Boundary, weight: float) -> tuple[Boundary, Terms]:
        """The next boundary and the terms of the loss: name -> (sum over tokens, its weight in the loss)."""
        terms: Terms = {}
        found = self.carried(batch, boundary, terms)
        if not self.is_last:
            return found, terms
        x = self._through("norm", found["hidden"], self.norm)
        loss = self._through("head", x, lambda x: self.head(x, batch.labels, batch.loss_mask, weight))
        if "mtp" in self.ends and self.training:
            ctx = self._context(batch, x.dtype)
            ctx.terms, ctx.sequence_weight = terms, self.sequence_weight
            self._predict(x, batch, ctx, weight)
        return {}, {"loss": (loss, weight), **terms}

    def _predict(self, x: Tensor, batch: Batch, ctx: Context, weight: float) -> None:
        """Several tokens ahead; leaves `mtp/k` in `ctx.terms`."""
        x = x if self.around is None else self.around.enter("mtp", x)
        self.mtp(x, batch, ctx, weight, self.mtp_embed, self.head)
        terms = ctx.terms
        if self.around is None or terms is None:
            return
        for name in [n for n in terms if n.startswith("mtp/")]:
            value, share = terms[name]
            terms[name] = self.around.leave("mtp", value), share

    def logits(self, batch: Batch, boundary: Boundary) -> tuple[Boundary, Tensor | None]:
        """The next boundary, and on the last stage the logits of the vocabulary rows held here."""
        found = self.carried(batch, boundary)
        return (found, None) if not self.is_last else ({}, self.logits_of(found["hidden"]))

    def scores(self, batch: Batch, boundary: Boundary) -> tuple[Boundary, Tensor | None]:
        """The next boundary, and on the last stage `label_scores` of the labels that the mask counts."""
        found = self.carried(batch, boundary)
        if not self.is_last:
            return found, None
        x = self._through("norm", found["hidden"], self.norm)
        return {}, self._through("head", x, lambda x: label_scores(self.head, x, batch.labels, batch.loss_mask))

    def logits_of(self, x: Tensor) -> Tensor:
        """[B, S, rows held here] of what `hidden` gave on the last stage."""
        return self._through("head", self._through("norm", x, self.norm), self.head.logits)
