"""A sample that is more than a stretch of text: every slot with its label, weight, document and position. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """tokens, labels, documents, positions: int64[S]; loss: float32[S]. Documents of a row are isolated; rows of a
    dataset that never has more than one in a row have None.
    """

    tokens: Tokens
    labels: Tokens
    loss: npt.NDArray[np.float32]
    documents: Tokens | None
    positions: Tokens


@dataclass(frozen=True)
class Pair:
    """What an encoder reads, `length` tokens of it, and what a decoder reads and writes.

    source: int64[E]; tokens, labels: int64[S]; loss: float32[S].
    """

    source: Tokens
    length: int
    tokens: Tokens
    labels: Tokens
    loss: npt.NDArray[np.float32]


def document_starts(ends: npt.NDArray[np.bool_]) -> Tokens:
    """For each slot the one at which its document starts in this row; `ends`, [.., S]: where one ends."""
    starts = np.zeros(ends.shape, dtype=np.int64)
    starts[..., 1:] = np.where(ends[..., :-1], np.arange(1, ends.shape[-1]), 0)
    return np.maximum.accumulate(starts, axis=-1)


def packed_row(documents: list[Tokens], weights: list[npt.NDArray[np.float32]], length: int) -> Row:
    """Documents side by side in `length` slots: document of n ids has n - 1 slots, each with the next id as its label.

    weights: of each id of a document as a label. What is left of the row is padding: no loss, a document of its own.
    Whether a slot has loss follows from its place and its weight, never from its id.
    """
    apart: Tokens = np.full(length, len(documents), dtype=np.int64)
    row = Row(
        np.zeros(length, dtype=np.int64),
        np.zeros(length, dtype=np.int64),
        np.zeros(length, dtype=np.float32),
        apart,
        np.zeros(length, dtype=np.int64),
    )
    at = 0
    for number, (ids, weight) in enumerate(zip(documents, weights, strict=True)):
        end = at + len(ids) - 1
        row.tokens[at:end], row.labels[at:end], row.loss[at:end] = ids[:-1], ids[1:], weight[1:]
        apart[at:end], row.positions[at:end] = number, np.arange(end - at)
        at = end
    row.positions[at:] = np.arange(length - at)
    return row
