"""Whole documents packed into rows: none is cut in two, none sees another. PURE.

Greedy best fit: documents from the longest to the shortest, each into the row where it leaves the least room. A
document longer than a row keeps its beginning; how many do is logged. One epoch is all rows once, in an order drawn
from the seed and the number of the epoch: a sample is a function of (seed, its number), and the position of a run one
integer.

Beside the pair PREFIX there may be a pair PREFIX.answers of the same lengths, with 1 for every id that carries loss as
a label and 0 for the others: what `chat` writes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse
from isotron.data.blend import ANSWERS
from isotron.data.indexed import IndexedDataset, idx_path
from isotron.data.rows import Row, Tokens, packed_row


class PackedDataset:
    """`num_samples` packed rows (one epoch of them when it is None) of a range of documents."""

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int = 0,
        log: Callable[[str], None] = print,
    ) -> None:
        self.data, self.seq_length, self.seed, self.vocab_size = data, seq_length, seed, vocab_size
        self.answers = open_answers(data)
        sizes = np.minimum(data.lengths[documents.start : documents.stop].astype(np.int64) - 1, seq_length)
        long = int(np.count_nonzero(data.lengths[documents.start : documents.stop] - 1 > seq_length))
        if long:
            log(f"{long:,} of {len(documents):,} documents of {data.prefix} are longer than a row and lose their end")
        self.bins = [[documents.start + i for i in held] for held in best_fit(sizes.tolist(), seq_length)]
        if not self.bins:
            raise refuse(
                f"--pack-documents with data {data.prefix}, documents {documents.start}..{documents.stop - 1}",
                "none of them has two tokens, so there is nothing to predict",
                "more data, or another --split",
            )
        self.count = len(self.bins) if num_samples is None else num_samples
        self.tokens_per_epoch = len(self.bins) * seq_length
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        epoch, place = divmod(index, len(self.bins))
        ids: list[Tokens] = []
        weights: list[npt.NDArray[np.float32]] = []
        for document in self.bins[int(self._epoch(epoch)[place])]:
            count = min(int(self.data.lengths[document]), self.seq_length + 1)
            ids.append(self.data.get(document, 0, count).astype(np.int64))
            weights.append(
                np.ones(count, dtype=np.float32)
                if self.answers is None
                else self.answers.get(document, 0, count).astype(np.float32)
            )
            if self.vocab_size and not 0 <= int(ids[-1].min()) <= int(ids[-1].max()) < self.vocab_size:
                raise refuse(
                    f"data {self.data.prefix} with a vocabulary of {self.vocab_size}",
                    f"document {document} has ids {int(ids[-1].min())}..{int(ids[-1].max())}",
                    "the tokenizer that the data was preprocessed with",
                )
        return packed_row(ids, weights, self.seq_length)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of the rows in one epoch."""
        if self._order[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.bins))
            self._order = (epoch, order)
        return self._order[1]


def open_answers(data: IndexedDataset) -> IndexedDataset | None:
    """The pair that says which ids carry loss; None where there is none, refused where it does not fit."""
    prefix = data.prefix + ANSWERS
    if not idx_path(prefix).is_file():
        return None
    answers = IndexedDataset(prefix)
    if not np.array_equal(answers.lengths, data.lengths):
        case = f"{prefix} has other documents than {data.prefix}"
        raise refuse(f"data {data.prefix}", case, "both pairs as they were written together")
    return answers


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of items by bin, items of 0 or less left out; the longest first, each where the least room is left."""
    order = sorted((i for i, size in enumerate(sizes) if size > 0), key=lambda i: (-sizes[i], i))
    bins: list[list[int]] = []
    room: dict[int, list[int]] = {}  # free slots -> bins that have as many
    free: list[int] = []  # its keys, sorted
    for item in order:
        at = bisect_left(free, sizes[item])
        if at == len(free):
            bins.append([])
            chosen, left = len(bins) - 1, capacity
        else:
            left = free[at]
            chosen = room[left].pop()
            if not room[left]:
                del room[left], free[at]
        bins[chosen].append(item)
        left -= sizes[item]
        if left > 0:
            if left not in room:
                insort(free, left)
            room.setdefault(left, []).append(chosen)
    return bins
