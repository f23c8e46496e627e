"""Samples of `seq_length + 1` tokens from indexed files, in Megatron's order. PURE.

A dataset here is anything with a length and items that are int64 arrays of seq_length + 1 tokens. Sample i depends on
the files, the split, the seed, the sequence length and the requested number of samples, and on nothing else.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from isotron.core.errors import refuse
from isotron.data.gpt_index import Indexes, build_indexes, plan_epochs
from isotron.data.index_cache import Expected, IndexCache
from isotron.data.indexed import IndexedDataset, bin_path, idx_path
from isotron.data.rows import Tokens

ENTRIES_PER_S = 2e7  # of an index, measured on one core


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Sample `index`: int64[seq_length + 1], inputs all but the last token, labels all but the first; or a Row."""


class GPTDataset:
    """At least `num_samples` samples of a range of documents (one epoch of them when it is None).

    vocab_size: ids outside it are refused when they are read; 0 means unknown.
    """

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache: IndexCache | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.data, self.documents, self.seq_length, self.vocab_size = data, documents, seq_length, vocab_size
        self.tokens_per_epoch = int(np.sum(data.lengths[documents.start : documents.stop], dtype=np.int64))
        if self.tokens_per_epoch < seq_length + 1:
            raise refuse(
                f"--seq-length {seq_length} with data {data.prefix}, documents {documents.start}..{documents.stop - 1}",
                f"they hold {self.tokens_per_epoch} tokens, one sample takes {seq_length + 1}",
                "more data, a shorter --seq-length, or another --split",
            )
        self.indexes = self._indexes(num_samples, seed, cache)

    def _indexes(self, num_samples: int | None, seed: int, cache: IndexCache | None) -> Indexes:
        def build() -> Indexes:
            return build_indexes(self.data.lengths, self.documents, num_samples, self.seq_length, seed)

        if cache is None:
            return build()
        index, tokens = os.stat(idx_path(self.data.prefix)), os.stat(bin_path(self.data.prefix))
        description = {
            "kind": "gpt",
            "prefix": os.path.abspath(self.data.prefix),
            "files": [index.st_size, index.st_mtime_ns, tokens.st_size],
            "documents": [self.documents.start, self.documents.stop],
            "num_samples": num_samples,
            "seq_length": self.seq_length,
            "seed": seed,
        }
        plan = plan_epochs(self.tokens_per_epoch, num_samples, self.seq_length)
        entries = len(self.documents) * plan.epochs + 3 * plan.samples
        epochs = f"{plan.epochs:,} epoch{'s' if plan.epochs > 1 else ''}"
        what = f"{len(self.documents):,} documents, {epochs}, {plan.samples:,} samples"
        expected = Expected(4 * entries, entries / ENTRIES_PER_S, what)
        return Indexes(**cache.get(description, expected, lambda: vars(build())))

    def __len__(self) -> int:
        return len(self.indexes.shuffle)

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = int(self.indexes.shuffle[index])
        (place, begin), (last, end) = self.indexes.sample[row].tolist(), self.indexes.sample[row + 1].tolist()
        parts = []
        for at in range(place, last + 1):
            first = begin if at == place else 0
            count = end + 1 - first if at == last else None
            parts.append(self.data.get(int(self.indexes.document[at]), first, count))
        tokens = np.concatenate(parts).astype(np.int64)
        if self.vocab_size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise refuse(
                f"data {self.data.prefix} with a vocabulary of {self.vocab_size}",
                f"sample {index} has ids {int(tokens.min())}..{int(tokens.max())}",
                "the tokenizer that the data was preprocessed with",
            )
        return tokens


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """The document ranges of training, validation and test for a split such as "969,30,1"."""
    words = split.replace("/", ",").replace(" ", ",").split(",")
    try:
        parts = [float(word) for word in words if word]
    except ValueError:
        parts = []
    total = sum(parts)
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < total < float("inf"):
        raise refuse(f"--split {split}", "a split is one to three numbers >= 0, not all 0", "--split 969,30,1")
    shares = (np.asarray(parts + [0.0] * (3 - len(parts))) / np.sum(np.asarray(parts))).tolist()
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    # rounded as Megatron does, half to even, so that the same documents end up in the same part
    cuts = [int(round(bound * float(documents))) for bound in bounds]
    return range(cuts[0], cuts[1]), range(cuts[1], cuts[2]), range(cuts[2], cuts[3])
