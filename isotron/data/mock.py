"""Made-up samples that a model can learn: rows that count upwards, cut into documents. PURE."""

from __future__ import annotations

import numpy as np

from isotron.data.rows import Tokens

DEFAULT_VOCAB = 256
DOCUMENT = 64  # mean tokens per document


class MockDataset:
    """`num_samples` samples as a function of (seed, number): documents that count up by one, each from a random id.

    With `eod` every document ends with it; the other ids are below `vocab_size` (0 means 256) and never `eod`.
    """

    def __init__(
        self, num_samples: int, seq_length: int, seed: int, vocab_size: int = 0, eod: int | None = None
    ) -> None:
        self.num_samples, self.seq_length, self.seed, self.eod = num_samples, seq_length, seed, eod
        self.vocab_size = vocab_size or DEFAULT_VOCAB

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = np.random.default_rng((self.seed, index))
        length = self.seq_length + 1
        cuts = np.flatnonzero(random.random(length) < 1 / DOCUMENT)
        starts = np.concatenate(([0], cuts[cuts < length - 1] + 1))
        where = np.searchsorted(starts, np.arange(length), side="right") - 1
        others = self.vocab_size - (self.eod is not None)
        tokens = (random.integers(0, others, len(starts))[where] + np.arange(length) - starts[where]) % others
        if self.eod is not None:
            tokens += tokens >= self.eod
            tokens[cuts] = self.eod
        return tokens.astype(np.int64)
