"""Fill-in-the-middle: documents rearranged so that a model learns to write what is missing between two parts. PURE.

Bavarian et al. 2022. A document in a row is cut at two random places and becomes prefix-suffix-middle,
`<prefix> a <suffix> c <middle> b`, or suffix-prefix-middle, `<prefix> <suffix> c <middle> a b`. With a tokenizer the
cuts fall between characters of its text, as where a person's cursor stands, and the parts are encoded anew; without one
between tokens. A row that grew is cut at its length. What happens to a row depends on the seed and its number alone, so
a resumed run sees the same rows.
"""

from __future__ import annotations

import numpy as np

from isotron.core.errors import refuse
from isotron.data.config import DataConfig
from isotron.data.gpt_dataset import Dataset
from isotron.data.rows import Tokens
from isotron.tokenizers.base import Tokenizer


def fim_tokens(config: DataConfig) -> tuple[int, int, int]:
    """The ids of prefix, middle and suffix; refused unless there are three different ones."""
    ids = config.fim_token_ids
    if len(set(ids)) != 3 or len(ids) != 3 or min(ids) < 0:
        raise refuse(
            f"--fim-rate {config.fim_rate} --fim-token-ids {','.join(map(str, ids))}",
            "it takes three different ids: of the prefix, middle and suffix token of the tokenizer",
            "--fim-token-ids 100258,100259,100260, which are those of cl100k_base",
        )
    return ids[0], ids[1], ids[2]


class FimDataset:
    """Rows of `dataset` with a share `rate` of their documents rearranged, `spm_rate` of those suffix first.

    tokens: ids of prefix, middle and suffix. eod: ends a document; None: a row is one document. tokenizer: documents
    are cut in their text; None: between tokens.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokens: tuple[int, int, int],
        eod: int | None,
        rate: float,
        spm_rate: float,
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.dataset, self.tokens, self.eod = dataset, tokens, eod
        self.rate, self.spm_rate, self.seed, self.tokenizer = rate, spm_rate, seed, tokenizer

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Tokens:
        row = self.dataset[index]
        random = np.random.default_rng((self.seed, index))
        ends = np.flatnonzero(row == self.eod) if self.eod is not None else np.empty(0, dtype=np.int64)
        parts: list[Tokens] = []
        start = 0
        for end in (*ends.tolist(), len(row)):
            parts += [self._rearranged(row[start:end], random), row[end : end + 1]]
            start = end + 1
        return np.concatenate(parts)[: len(row)]

    def _rearranged(self, document: Tokens, random: np.random.Generator) -> Tokens:
        """One document without its end; as it was for the share that is left alone."""
        rate, order, *places = random.random(4)
        if rate >= self.rate or len(document) < 2:
            return document
        prefix, middle, suffix = (np.array([token], dtype=np.int64) for token in self.tokens)
        a, b, c = self._cut(document, *sorted(places))
        if order < self.spm_rate:
            return np.concatenate((prefix, suffix, c, middle, a, b))
        return np.concatenate((prefix, a, suffix, c, middle, b))

    def _cut(self, document: Tokens, low: float, high: float) -> tuple[Tokens, Tokens, Tokens]:
        """The document in three parts, cut at two places between 0 and 1.

        Between tokens also where its text does not give back its ids (a row may begin or end within a character), and
        where the parts have fewer ids than the whole, so that the row would be too short.
        """
        text = "" if self.tokenizer is None else self.tokenizer.decode(document.tolist())
        if self.tokenizer is not None and self.tokenizer.encode(text) == document.tolist():
            first, second = (int(place * (len(text) + 1)) for place in (low, high))
            parts = self.tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
            if sum(map(len, parts)) >= len(document):
                a, b, c = (np.array(part, dtype=np.int64) for part in parts)
                return a, b, c
        first, second = (int(place * (len(document) + 1)) for place in (low, high))
        return document[:first], document[first:second], document[second:]
