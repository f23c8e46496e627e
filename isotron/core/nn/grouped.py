"""Products of rows that lie sorted by expert with the matrices of their experts.

Legend: E experts, N rows, I inputs, O outputs. A `Span` is a run of rows and what multiplies them: all rows and all
experts where the device has one call for that, else one expert's. Who works span by span works in the first case on
everything at once, and in the second, on a CPU, on what still lies in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from isotron.core.device import has_grouped_matmul
from isotron.core.nn import blocks
from isotron.core.nn.linear import add_narrow

CACHED_BYTES = 1 << 20  # of the first tensor of a block of rows; two or three others lie beside it


@dataclass(frozen=True)
class Groups:
    """How many consecutive rows belong to each expert."""

    counts: Tensor  # [E], int64

    def spans(self, *widths: int, like: Tensor) -> Sequence[Span]:
        """All rows in spans, for matrices of these widths and the type of `like`."""
        whole = all(n * like.element_size() % 16 == 0 for n in widths)  # what a grouped product takes
        if whole and has_grouped_matmul(like.device, like.dtype):
            return [Together(slice(0, len(like)), slice(0, len(self.counts)), self.counts)]
        ends = pairwise(accumulate(self.counts.tolist(), initial=0))
        return [Span(slice(a, b), slice(e, e + 1)) for e, (a, b) in enumerate(ends)]


@dataclass(frozen=True)
class Span:
    """The rows of one expert."""

    rows: slice
    experts: slice

    def product(self, x_NI: Tensor, w_EIO: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """This span's rows x_NI times their matrices among all w_EIO; into `out_NO` where it can be."""
        return torch.mm(x_NI, w_EIO[self.experts.start], out=out_NO)  # type: ignore[no-any-return]

    def of_rows(self, b_EO: Tensor) -> Tensor:
        """Each row's own among all b_EO."""
        return b_EO[self.experts]

    def outer(self, dy_NO: Tensor, x_NI: Tensor, out_EOI: Tensor, fresh: bool) -> None:
        """Add dy^T x of this span's rows to its matrices among all of `out_EOI`; `fresh` replaces what is there."""
        out = out_EOI[self.experts.start]
        if not len(x_NI):
            if fresh:
                out.zero_()
        elif out.dtype == x_NI.dtype:
            torch.addmm(out, dy_NO.t(), x_NI, beta=0 if fresh else 1, out=out)
        else:
            _add(out, dy_NO.t() @ x_NI, fresh)

    def sums(self, dy_NO: Tensor, out_EO: Tensor) -> None:
        """The sums of this span's rows into their places of `out_EO`."""
        torch.sum(dy_NO, 0, dtype=out_EO.dtype, out=out_EO[self.experts.start])


@dataclass(frozen=True)
class Together(Span):
    """All rows of all experts."""

    counts: Tensor

    def product(self, x_NI: Tensor, w_EIO: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """One call; it gives a tensor of its own."""
        return torch._grouped_mm(x_NI, w_EIO, offs=self._ends())

    def of_rows(self, b_EO: Tensor) -> Tensor:
        """Each row's own."""
        return b_EO[self._expert_of_row()]

    def outer(self, dy_NO: Tensor, x_NI: Tensor, out_EOI: Tensor, fresh: bool) -> None:
        """One call."""
        _add(out_EOI, torch._grouped_mm(dy_NO.t(), x_NI, offs=self._ends()), fresh)

    def sums(self, dy_NO: Tensor, out_EO: Tensor) -> None:
        """By expert."""
        out_EO.zero_().index_add_(0, self._expert_of_row(), dy_NO.to(out_EO.dtype))

    def _ends(self) -> Tensor:
        return self.counts.cumsum(0).to(torch.int32)

    def _expert_of_row(self) -> Tensor:
        n = self.counts
        return torch.repeat_interleave(torch.arange(len(n), device=n.device), n)


def _add(total: Tensor, part: Tensor, fresh: bool) -> None:
    if fresh:
        total.copy_(part)
    else:
        add_narrow(total, part)


def cached(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors' rows in blocks of the same rows that stay in a CPU's cache; all at once elsewhere."""
    first = tensors[0]
    if first.device.type != "cpu" or not first.numel():
        yield tensors
        return
    rows = max(1, CACHED_BYTES // (first.shape[1] * first.element_size()))
    for start in blocks.starts(len(first), rows):
        yield tuple(t[start : start + rows] for t in tensors)
