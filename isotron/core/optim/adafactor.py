"""Adafactor: of a matrix's second moments only the means of its rows and of its columns are kept.

The numbers are those of `torch.optim.Adafactor` on whole matrices, whatever the layout: every rank sums squares over
the pieces that it holds, these sums are added over the ranks of the stage in rank order, and so are the lengths of
weights and updates, by which the update is scaled. Queries, keys, values, gate, up and each expert are matrices of
their own. Row and column means are short, so every rank of a stage keeps those of the whole stage; of a vector it keeps
the second moments themselves.

Source: Shazeer & Stern 2018, algorithms 4 to 6, without momentum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from isotron.core.layout import Box, Ints
from isotron.core.mesh import Group
from isotron.core.optim.clip import sum_of_squares
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.kept import Whole
from isotron.core.optim.matrices import Matrix, parts
from isotron.core.optim.method import Shared, Todo
from isotron.core.optim.spread import dealt, held, sum_in_order
from isotron.core.parallel.data import View

BLOCK = 1 << 22  # elements of an update at a time


@dataclass(frozen=True)
class Factors:
    """Where the means of one matrix lie among those of the stage: of rows in [start, middle), of columns from there on;
    of a vector there are only the first, its second moments. `number`: of the matrix.
    """

    matrix: Matrix
    number: int
    start: int

    @property
    def shape(self) -> Ints:
        """Of the matrix."""
        return self.matrix.box.shape

    @property
    def wide(self) -> bool:
        """Whether it has columns."""
        return len(self.shape) > 1

    @property
    def row_shape(self) -> Ints:
        """Of the means of rows."""
        return self.shape[:-1] if self.wide else self.shape

    @property
    def column_shape(self) -> Ints:
        """Of the means of columns."""
        return (*self.shape[:-2], self.shape[-1]) if self.wide else (0,)

    @property
    def middle(self) -> int:
        """Where the means of columns begin."""
        return self.start + prod(self.row_shape)

    @property
    def stop(self) -> int:
        """The end of the means."""
        return self.middle + prod(self.column_shape)

    def rows(self, flat: Tensor) -> Tensor:
        """Means of rows."""
        return flat[self.start : self.middle].view(self.row_shape)

    def columns(self, flat: Tensor) -> Tensor:
        """Means of columns."""
        return flat[self.middle : self.stop].view(self.column_shape)


@dataclass(frozen=True)
class _Piece:
    """A part of a matrix that this rank holds. `counts`: whether it is this rank that adds it to the sums."""

    of: Factors
    box: Box
    master: Tensor
    grad: Tensor
    lr: float
    decay: float
    counts: bool

    @property
    def at_rows(self) -> tuple[slice, ...]:
        """Its rows among those of the matrix."""
        found = self.box.slices()
        return found[:-1] if self.of.wide else found

    @property
    def at_columns(self) -> tuple[slice, ...]:
        """Its columns among those of the matrix."""
        found = self.box.slices()
        return (*found[:-2], found[-1])

    def blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient some rows at a time, with theirs of `rows`."""
        height = max(1, BLOCK // max(1, self.grad.shape[-1] * prod(self.grad.shape[:-2])))
        return zip(self.grad.split(height, -2), rows.split(height, -1), strict=True)


class Adafactor:
    """`group`, `like`: as of `Muon`."""

    states: tuple[str, ...] = ()
    together = True

    def __init__(self, cfg: OptimConfig, views: Sequence[View], group: Group, like: Tensor) -> None:
        self.cfg, self.group = cfg, group
        self.factors: list[Factors] = []
        for number, matrix in enumerate(sorted(dealt(views, group), key=lambda m: (m.name, m.box.offset))):
            self.factors.append(Factors(matrix, number, self.factors[-1].stop if self.factors else 0))
        self.means = like.new_zeros(self.factors[-1].stop if self.factors else 0)
        self._of = {(f.matrix.name, f.matrix.box): f for f in self.factors}
        self._placed = {v.placed.name: v.placed for v in views}

    def update(self, todo: Todo) -> None:
        """Collective over the group; gradients are replaced by updates."""
        pieces = list(self._pieces(todo))
        if todo.grads:
            torch._foreach_mul_(todo.grads, todo.factor)
        step = todo.updates + 1
        total = sum_in_order(self._sums(pieces), self.group)
        self.means.lerp_(total[: len(self.means)], step**-self.cfg.adafactor_decay)
        weights = self._lengths(total[len(self.means) :])
        updates = self._lengths(sum_in_order(self._scaled(pieces), self.group))
        for piece in pieces:
            number = piece.of.number
            alpha = max(self.cfg.adafactor_min_rms, weights[number]) * min(piece.lr, 1 / sqrt(step))
            piece.master.mul_(1 - piece.lr * piece.decay)
            piece.master.sub_(piece.grad, alpha=alpha / max(1.0, updates[number] / self.cfg.adafactor_clip))

    def _pieces(self, todo: Todo) -> Iterator[_Piece]:
        """What this rank holds of each matrix, boxes counted from its corner."""
        for i, view in enumerate(todo.views):
            regions = parts(view.placed.rule)
            both = zip(held(view, todo.masters[i]), held(view, todo.grads[i]), strict=True)
            for (box, master), (_, grad) in both:
                region = next(r for r in regions if r.overlap(box) == box)
                of = self._of[view.placed.name, region]
                counts = (self.group.index, box) in of.matrix.sources
                yield _Piece(of, box.relative_to(region), master, grad, todo.lrs[i], todo.decays[i], counts)

    def _sums(self, pieces: Sequence[_Piece]) -> Tensor:
        """This rank's share of the means of squares, then of the squared lengths of weights."""
        sums = self.means.new_zeros(len(self.means) + len(self.factors))
        for piece in pieces:
            if not piece.counts:
                continue
            of = piece.of
            rows = of.rows(sums)[piece.at_rows]
            if of.wide:
                columns = of.columns(sums)[piece.at_columns]
                for some, its in piece.blocks(rows):
                    squares = some.square()
                    its.add_(squares.sum(-1), alpha=1 / of.shape[-1])
                    columns.add_(squares.sum(-2), alpha=1 / of.shape[-2])
            else:
                rows.add_(piece.grad.square())
            sums[len(self.means) + of.number] += sum_of_squares(piece.master)
        return sums

    def _scaled(self, pieces: Sequence[_Piece]) -> Tensor:
        """Divides gradients by the roots of the second moments that the means give; squared lengths of the results."""
        sums = self.means.new_zeros(len(self.factors))
        floor = self.cfg.adafactor_eps or torch.finfo(self.means.dtype).eps
        for piece in pieces:
            rows, grad = piece.of.rows(self.means)[piece.at_rows], piece.grad
            if not piece.of.wide:
                grad.mul_(rows.clamp(min=floor * floor).rsqrt_())
            else:
                columns = piece.of.columns(self.means)[piece.at_columns]
                mean = piece.of.rows(self.means).mean(-1, keepdim=True).clamp_(min=floor)
                rows = rows / mean[piece.at_rows[:-1]]
                for some, its in piece.blocks(rows):
                    second = its.unsqueeze(-1) * columns.unsqueeze(-2)
                    some.mul_(second.clamp_(min=floor * floor).rsqrt_())
            if piece.counts:
                sums[piece.of.number] += sum_of_squares(grad)
        return sums

    def _lengths(self, squares: Tensor) -> list[float]:
        """Root mean squares of all matrices."""
        return [sqrt(s / f.matrix.box.size) for s, f in zip(squares.tolist(), self.factors, strict=True)]

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def shared(self) -> Iterator[Shared]:
        """The means of every parameter of which this rank holds a part. Those of a matrix are saved by the first rank
        that holds some of it.
        """
        kept = Whole(self.means)
        for name, placed in self._placed.items():
            mine = [f for f in self.factors if f.matrix.name == name]
            saves = [placed.counts and f.matrix.sources[0][0] == self.group.index for f in mine]
            boxes, shape = [f.matrix.box for f in mine], placed.rule.shape
            if len(shape) < 2:
                yield Shared(f"exp_avg_sq/{name}", shape, kept, _cut(boxes, [f.start for f in mine], saves))
                continue
            for kind, dim, starts in (("row", -1, [f.start for f in mine]), ("col", -2, [f.middle for f in mine])):
                rest, at = without(dim, shape, boxes)
                yield Shared(f"exp_avg_sq_{kind}/{name}", rest, kept, _cut(at, starts, saves))


def _cut(boxes: Sequence[Box], starts: Sequence[int], saves: Sequence[bool]) -> tuple[tuple[Box, int, bool], ...]:
    return tuple(zip(boxes, starts, saves, strict=True))


def without(dim: int, shape: Ints, boxes: Sequence[Box]) -> tuple[Ints, list[Box]]:
    """Shape and boxes of what has one number along `dim` for each of some boxes that make up a tensor. Boxes that
    differ along `dim` stand one behind the other, along a new first dimension.
    """
    starts = sorted({box.offset[dim] for box in boxes})
    more = len(starts) > 1

    def rest(numbers: Ints, first: int) -> Ints:
        left = tuple(n for d, n in enumerate(numbers) if d != dim % len(shape))
        return (first, *left) if more else left

    found = [Box(rest(b.offset, starts.index(b.offset[dim])), rest(b.shape, 1)) for b in boxes]
    return rest(shape, len(starts)), found
