"""Cross-entropy of a chunk of logits and the gradient of it, in place, and the weight gradient that follows from that.

Legend: N tokens, D hidden, V vocabulary rows held here, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isotron.core.nn import blocks, products
from isotron.core.nn.linear import GradSink, add_narrow

CHUNK_BYTES = 64 << 20  # logits at hand: wide enough for good matrix products
BLOCK_BYTES = 4 << 20  # logits in float32 at a time: small enough for the cache


def tokens(w_VD: Tensor) -> int:
    """How many are in a chunk: whole turns of a product, where there is room for one."""
    fit = max(16, CHUNK_BYTES // (w_VD.element_size() * max(1, w_VD.shape[0])))
    return fit - fit % products.HOST_ROWS if fit > products.HOST_ROWS else fit


class Vocab(Protocol):
    """Socket: how the ranks that split a vocabulary meet."""

    @property
    def first(self) -> int:
        """The global id of the first row held here."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Stack every rank's x: [ranks, *x.shape], in rank order."""
        ...


class Sums(NamedTuple):
    """Of a chunk: log of the sum of exponentials [C], and this rank's part of that sum [C] where ranks split it."""

    lse: Tensor
    share: Tensor | None


@dataclass
class Chunks:
    """What one call of the loss works on, chunk by chunk.

    `w_VD` and `bias_V` the rows of vocabulary without padding, `labels_N` and `mask_N` of the tokens, `scale` what the
    gradients are multiplied with, `rows` the tokens of a chunk. Mask and scale enter before the gradient of the logits
    is rounded: float16 has no room for small probabilities, and what follows needs no passes of its own.
    """

    w_VD: Tensor
    bias_V: Tensor | None
    labels_N: Tensor
    mask_N: Tensor
    scale: float
    rows: int
    vocab: Vocab | None
    softcap: float

    def __post_init__(self) -> None:
        self.wide = torch.promote_types(self.w_VD.dtype, torch.float32)

    def __iter__(self) -> Iterator[slice]:
        return (slice(start, start + self.rows) for start in range(0, len(self.labels_N), self.rows))

    def buffer(self) -> Tensor:
        """Room for the logits of a chunk."""
        return self.w_VD.new_empty(min(self.rows, len(self.labels_N)), len(self.w_VD))

    def row(self, part: slice) -> Tensor:
        """What the gradients of a chunk's tokens are multiplied with, [C, 1]."""
        return self.mask_N[part].to(self.wide)[:, None] * self.scale

    def gradient(self, part: slice, x_CD: Tensor, out: Tensor, sums: Sums | None = None) -> tuple[Tensor, Tensor, Sums]:
        """(gradient of the logits [C, V] in `out`, losses [C], sums); with `sums` of a call before nobody is asked."""
        logits = products.times_into(out[: len(x_CD)], x_CD, self.w_VD, self.bias_V)
        slope = _cap(logits, self.softcap) if self.softcap else None
        losses, sums = loss_gradient(logits, self.labels_N[part], self.row(part), self.vocab, sums)
        if slope is not None:
            logits.mul_(slope)
        return logits, losses, sums

    def input_gradient(self, logits_CV: Tensor, out_CD: Tensor) -> None:
        """The gradient of the chunk's x, from that of its logits."""
        products.times_into(out_CD, logits_CV, self.w_VD.t())


def _local_softmax(logits: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of logits_CV in place, times `row` [C, 1]; the highest logit and the sum of exp(l - highest), both [C].

    In float32 or wider; 16-bit logits pass through a small wide block.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    top, total = torch.empty(2, len(logits), dtype=wide, device=logits.device)
    step = max(1, BLOCK_BYTES // (4 * logits.shape[1]))
    scratch = torch.empty(0 if logits.dtype == wide else step, logits.shape[1], dtype=wide, device=logits.device)
    for start in blocks.starts(len(logits), step):
        part = slice(start, start + step)
        block = logits[part] if logits.dtype == wide else scratch[: len(logits[part])].copy_(logits[part])
        top[part] = block.amax(1)
        torch.softmax(block, 1, out=block)
        total[part] = 1 / block.amax(1)  # the largest probability is exp(0) / total
        block.mul_(row[part])
        if block.dtype != logits.dtype:
            logits[part] = block
    return top, total


def loss_gradient(
    logits: Tensor, labels: Tensor, row: Tensor, vocab: Vocab | None, sums: Sums | None = None
) -> tuple[Tensor, Sums]:
    """Per-token losses [C] and their sums; logits_CV become (softmax - one at the label) x row, in place.

    With `sums` given, where ranks split the vocabulary, the losses are right only where the label is held here.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    width = logits.shape[1]
    local = labels if vocab is None else labels - vocab.first
    inside = (local >= 0) & (local < width)
    at = local.clamp(0, max(width - 1, 0))[:, None]
    if width:
        target = torch.gather(logits, 1, at)[:, 0].to(wide).masked_fill(~inside, 0)
        top, total = _local_softmax(logits, row)
    else:  # this rank holds padding only
        top = torch.full(labels.shape, -torch.inf, dtype=wide, device=labels.device)
        target = total = torch.zeros_like(top)
    if sums is None:
        sums, target = _meet(top, total, target, vocab)
    if sums.share is not None:
        logits.mul_(sums.share[:, None])
    if width:
        at_label = torch.expm1(target - sums.lse) * row[:, 0]  # exact where the probability is near one
        place = torch.arange(len(at), device=at.device), at[:, 0]
        logits[place] = torch.where(inside, at_label.to(logits.dtype), logits[place])
    return sums.lse - target, sums


def _meet(top: Tensor, total: Tensor, target: Tensor, vocab: Vocab | None) -> tuple[Sums, Tensor]:
    """The sums over everybody's rows, and the logit of the label, wherever it is held."""
    if vocab is None:
        return Sums(top + total.log(), None), target
    tops, totals, targets = vocab.gather(torch.stack((top, total, target))).unbind(1)
    highest = tops.amax(0)
    everything = (totals * (tops - highest).exp()).sum(0)
    return Sums(highest + everything.log(), total * (top - highest).exp() / everything), targets.sum(0)


def _cap(logits: Tensor, softcap: float) -> Tensor:
    """Bounds logits_CV in place: softcap x tanh(logit / softcap). The derivative of that, [C, V]."""
    torch.tanh(logits.div_(softcap), out=logits)
    slope = 1 - logits.square()
    logits.mul_(softcap)
    return slope


class Accumulator:
    """Adds p_CV^T x_CD over the chunks into a sink, or into a tensor like `w` of its own; further rows of either are
    padding.
    """

    def __init__(self, w: Tensor, sink: GradSink | None) -> None:
        if sink is None:
            self.buffer, self.empty = torch.empty_like(w), True
        else:
            self.buffer, self.empty, sink.fresh = sink.buffer, sink.fresh, False

    def add(self, p: Tensor, x: Tensor) -> None:
        """One chunk."""
        rows = self.buffer[: p.shape[1]]
        if self.empty:
            self.buffer[p.shape[1] :].zero_()
        if rows.dtype == p.dtype:
            torch.addmm(rows, p.t(), x, beta=0 if self.empty else 1, out=rows)
        elif self.empty:
            rows.copy_(p.t() @ x)
        else:
            add_narrow(rows, p.t() @ x)
        self.empty = False
