"""Where tokens stand in their rows: runs of slots, the zigzag cut over ranks, the borders of documents. PURE.

A row of S slots is cut into 2n chunks, and rank i of n holds chunks i and 2n-1-i, so that causal attention costs every
rank the same. Source of the zigzag: Megatron-LM's context parallelism; Brandon et al. 2023 (striped attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """`length` tokens that follow one another both here (from index `local`) and in their row (from slot `row`)."""

    local: int
    row: int
    length: int


Runs = tuple[Run, ...]
Cuts = tuple[tuple[int, ...], ...]  # for each row of a batch: first slots of its documents, and its length


def whole(length: int) -> Runs:
    """A row in one piece."""
    return (Run(0, 0, length),)


def zigzag(index: int, count: int, length: int) -> Runs:
    """What rank `index` of `count` holds of a row of `length` slots."""
    if count == 1:
        return whole(length)
    if length % (2 * count):
        raise ValueError(f"{length} slots are not cut into {2 * count} equal chunks")
    chunk = length // (2 * count)
    return Run(0, index * chunk, chunk), Run(chunk, (2 * count - 1 - index) * chunk, chunk)


def joined(parts: Sequence[Runs]) -> Runs:
    """The runs of several ranks, their tokens laid one after the other."""
    found: list[Run] = []
    start = 0
    for runs in parts:
        found += [Run(start + r.local, r.row, r.length) for r in runs]
        start += sum(r.length for r in runs)
    return tuple(found)


def slots(runs: Runs) -> list[int]:
    """The row slot of every local token."""
    return [slot for r in runs for slot in range(r.row, r.row + r.length)]


def borders(documents: Sequence[int]) -> tuple[int, ...]:
    """First slots of the documents of one row, and its length, from a document number per slot."""
    starts = [i for i in range(len(documents)) if i == 0 or documents[i] != documents[i - 1]]
    return (*starts, len(documents))
