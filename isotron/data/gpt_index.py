"""Which tokens make up which sample: the document, sample and shuffle indexes of Megatron's GPT dataset. PURE.

The documents of a split are repeated for whole epochs, shuffled, and read as one long stream; sample i is
`seq_length + 1` tokens of it from position i * seq_length, so neighbours share one token (the last label is the next
first input). The samples are shuffled once more. Equal, bit for bit, to megatron-core for the same lengths, seed,
sequence length and sample count: the order of the random draws matters, do not change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.integer]
LAST_EPOCH = 0.80  # a last epoch of which less than this is used is shuffled apart from the others


@dataclass(frozen=True)
class Indexes:
    """document: place in the stream -> document, [epochs x documents].

    sample: [samples + 1, 2], where each sample starts, as (place of its document in `document`, token offset in it).
    shuffle: number of a sample as it is asked for -> row of `sample`.
    """

    document: Ints
    sample: Ints
    shuffle: Ints


@dataclass(frozen=True)
class Plan:
    """How many epochs and samples a request comes to. `separate`: the last epoch is shuffled by itself."""

    epochs: int
    samples: int
    samples_without_last: int
    separate: bool


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> Plan:
    """The fewest whole epochs that hold `num_samples` samples; one epoch when `num_samples` is None."""
    wanted = 0 if num_samples is None else num_samples * seq_length + 1
    epochs = max(1, -(-wanted // tokens_per_epoch))
    samples = (epochs * tokens_per_epoch - 1) // seq_length
    if epochs == 1 or num_samples is None:
        return Plan(epochs, samples, samples, False)
    before = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    return Plan(epochs, samples, before, num_samples - before < int(LAST_EPOCH * per_epoch))


def integers(most: int) -> type[np.signedinteger[Any]]:
    """The integers that count to `most`: of 32 bits as Megatron's, where they do."""
    return np.int32 if most <= np.iinfo(np.int32).max else np.int64


@np.errstate(all="raise")
def build_indexes(lengths: Ints, documents: range, num_samples: int | None, seq_length: int, seed: int) -> Indexes:
    """The three indexes over `documents` (numbers into `lengths`, which are in tokens)."""
    tokens_per_epoch = int(np.sum(lengths[documents.start : documents.stop], dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch, num_samples, seq_length)
    random = np.random.RandomState(seed)  # legacy generator: its stream is frozen by numpy, and Megatron's
    document = _document_index(documents, plan, random)
    sample = _sample_index(lengths, document, plan.samples, seq_length)
    return Indexes(document, sample, _shuffle_index(plan, random))


def _document_index(documents: range, plan: Plan, random: np.random.RandomState) -> Ints:
    once: Ints = np.arange(documents.start, documents.stop, dtype=integers(documents.stop))
    if not plan.separate:
        every = np.tile(once, plan.epochs)
        random.shuffle(every)
        return every
    first, last = np.tile(once, plan.epochs - 1), once.copy()
    random.shuffle(first)
    random.shuffle(last)
    return np.concatenate((first, last))


def _sample_index(lengths: Ints, document: Ints, samples: int, seq_length: int) -> Ints:
    """Where each sample starts: the document that holds stream position i * seq_length."""
    sizes = lengths[document].astype(np.int64)
    ends = np.cumsum(sizes)
    index: Ints = np.empty((samples + 1, 2), dtype=integers(max(len(document), int(sizes.max()))))
    block = 1 << 22  # keeps the 64-bit temporaries small beside the index itself
    for start in range(0, samples + 1, block):
        positions: Ints = np.arange(start, min(start + block, samples + 1), dtype=np.int64) * seq_length
        place = np.searchsorted(ends, positions, side="right")
        index[start : start + block, 0] = place
        index[start : start + block, 1] = positions - (ends[place] - sizes[place])
    index[0] = 0  # also when the first documents are empty
    return index


def _shuffle_index(plan: Plan, random: np.random.RandomState) -> Ints:
    kind = np.int64 if plan.samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    cut = plan.samples_without_last if plan.separate else plan.samples
    first: Ints = np.arange(cut, dtype=kind)
    random.shuffle(first)
    if cut == plan.samples:
        return first
    last: Ints = np.arange(cut, plan.samples, dtype=kind)
    random.shuffle(last)
    return np.concatenate((first, last))
