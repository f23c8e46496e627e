"""A sample that is more than a stretch of text: every slot with its label, weight, document and position. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """tokens, labels, documents, positions: int64[S]; loss: float32[S]. Documents of a row are isolated."""

    tokens: Tokens
    labels: Tokens
    loss: npt.NDArray[np.float32]
    documents: Tokens
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


def packed_row(documents: list[Tokens], weights: list[npt.NDArray[np.float32]], length: int) -> Row:
    """Documents side by side in `length` slots: document of n ids has n - 1 slots, each with the next id as its label.

    weights: of each id of a document as a label. What is left of the row is padding: no loss, a document of its own.
    Whether a slot has loss follows from its place and its weight, never from its id.
    """
    row = Row(
        np.zeros(length, dtype=np.int64),
        np.zeros(length, dtype=np.int64),
        np.zeros(length, dtype=np.float32),
        np.full(length, len(documents), dtype=np.int64),
        np.zeros(length, dtype=np.int64),
    )
    at = 0
    for number, (ids, weight) in enumerate(zip(documents, weights, strict=True)):
        end = at + len(ids) - 1
        row.tokens[at:end], row.labels[at:end], row.loss[at:end] = ids[:-1], ids[1:], weight[1:]
        row.documents[at:end], row.positions[at:end] = number, np.arange(end - at)
        at = end
    row.positions[at:] = np.arange(length - at)
    return row
