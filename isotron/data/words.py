"""Masked words: samples for a model that sees whole rows and says what stood where words are masked. PURE.

A stretch of text, between the tokens that begin and end a text where the tokenizer has them, fills a row. A share of
its tokens is chosen, each as likely as any other, and only they have loss: most of them become the mask, some a word
drawn from the vocabulary, the others stay. A sample is a function of (seed, part, its number): another epoch masks
other words. A share of the rows is cut short at a random length; the rest of those is padding, which no token sees.
Source: Devlin et al. 2019 (BERT), section 3.1 and appendix A.1; Liu et al. 2019 (RoBERTa), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from isotron.core.errors import Problem, Refused
from isotron.data.config import DataConfig
from isotron.data.rows import Row, Tokens, document_starts
from isotron.tokenizers.base import Tokenizer

LEAST = 2  # tokens of a text that is cut short: one to mask and one to see


class Words(Protocol):
    """What a family that fills in words says of them."""

    @property
    def family(self) -> str:
        """Its name."""
        ...

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        ...


@dataclass(frozen=True)
class WordMasking:
    """How stretches become rows of `row` tokens. `begin`, `end`: ids around a text. `kept`: ids that are never chosen.

    `share`: of the tokens that are chosen; of those become the mask (`masked`) or any word of `vocabulary` (`drawn`).
    `short`: share of the rows that are cut short. `isolate`: id that ends documents which do not see one another,
    `restart`: behind which positions begin again; None where rows are one text.
    """

    row: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    mask: int
    kept: tuple[int, ...]
    vocabulary: int
    share: float
    masked: float
    drawn: float
    short: float = 0.0
    isolate: int | None = None
    restart: int | None = None

    @property
    def text(self) -> int:
        """Tokens of a stretch."""
        return self.row - len(self.begin) - len(self.end)

    @property
    def apart(self) -> bool:
        """Whether there may be tokens of a row that do not see each other."""
        return self.short > 0 or self.isolate is not None

    def dataset(self, texts: Any, seed: int, part: int) -> WordDataset:
        """Rows from a dataset of stretches."""
        return WordDataset(texts, self, seed, part)


class WordDataset:
    """Rows from a dataset of stretches; `part` 0 is training, 1 validation."""

    def __init__(self, texts: Any, how: WordMasking, seed: int, part: int) -> None:
        self.texts, self.how, self.seed, self.part = texts, how, seed, part

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Row:
        random = np.random.default_rng((self.seed, self.part, index))
        return masked_row(self.texts[index][: self.how.text], self.how, random)


def masked_row(text: Tokens, how: WordMasking, random: np.random.Generator) -> Row:
    """One stretch with words masked."""
    if how.short and random.random() < how.short:
        text = text[: int(random.integers(LEAST, len(text) + 1))]
    labels = np.concatenate([np.array(how.begin, dtype=np.int64), text, np.array(how.end, dtype=np.int64)])
    length = len(labels)
    chosen = _chosen(labels, how, random)
    tokens = labels.copy()
    # what becomes of a chosen word: all are drawn for, so that none depends on another
    fate, words = random.random(len(chosen)), random.integers(0, how.vocabulary, len(chosen))
    tokens[chosen] = np.where(
        fate < how.masked, how.mask, np.where(fate < how.masked + how.drawn, words, labels[chosen])
    )
    loss: npt.NDArray[np.float32] = np.zeros(how.row, dtype=np.float32)
    loss[chosen] = 1.0
    return Row(
        _filled(tokens, how.row), _filled(labels, how.row), loss, _documents(labels, how),
        np.arange(how.row) if how.restart is None else _positions(labels, how, length),
    )  # fmt: skip


def _chosen(ids: Tokens, how: WordMasking, random: np.random.Generator) -> Tokens:
    """Places of the words to predict, ascending: a share of all that may be, at least one where there is any."""
    may = np.flatnonzero(~np.isin(ids, how.kept))
    count = min(max(round(len(may) * how.share), 1), len(may))
    return np.sort(random.choice(may, count, replace=False)) if count else may


def _documents(ids: Tokens, how: WordMasking) -> Tokens | None:
    """Which document a slot belongs to, padding the last; None where all rows are one."""
    if not how.apart:
        return None
    ends = ids == how.isolate if how.isolate is not None else np.zeros(len(ids), dtype=bool)
    found: Tokens = (np.cumsum(ends) - ends).astype(np.int64)
    return np.concatenate([found, np.full(how.row - len(ids), found[-1] + 1, dtype=np.int64)])


def _positions(ids: Tokens, how: WordMasking, length: int) -> Tokens:
    """Counted from the beginning of each document, and of the padding."""
    ends: npt.NDArray[np.bool_] = np.zeros(how.row, dtype=bool)
    ends[:length] = ids == how.restart
    ends[length - 1] = True
    return np.arange(how.row) - document_starts(ends)


def _filled(ids: Tokens, length: int) -> Tokens:
    row: Tokens = np.zeros(length, dtype=np.int64)
    row[: len(ids)] = ids
    return row


def word_masking(config: DataConfig, model: Words, tokenizer: Tokenizer | None) -> WordMasking:
    """How the data of a run are masked; refused where nothing stands for a masked word, or nothing ends documents."""
    eod, around = None if tokenizer is None else tokenizer.eod, _around(tokenizer)
    mask = _mask_id(config, model, tokenizer)
    asked = [n for n in ("reset_attention_mask", "reset_position_ids") if getattr(config, n)]
    problems = [_no_mask(config, model, mask, tokenizer)] if not 0 <= mask < model.vocab_size else []
    if asked and eod is None:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in asked)
        fix = "a tokenizer with one, or without these options"
        problems.append(Problem(flags, "the tokenizer has no end-of-document id", fix))
    if problems:
        raise Refused(problems)
    special = (mask, eod, *(getattr(tokenizer, role, None) for role in ("cls", "sep", "pad", "bos", "eos")))
    return WordMasking(
        config.seq_length, *around, mask, tuple(sorted({i for i in special if i is not None})), model.vocab_size,
        config.mask_prob, config.mask_replace_prob, config.random_replace_prob, config.short_seq_prob,
        eod if config.reset_attention_mask else None, eod if config.reset_position_ids else None,
    )  # fmt: skip


def _around(tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[CLS] before a text and [SEP] behind it, where the tokenizer has both."""
    begin, end = (getattr(tokenizer, role, None) for role in ("cls", "sep"))
    return ((), ()) if begin is None or end is None else ((begin,), (end,))


def _mask_id(config: DataConfig, model: Words, tokenizer: Tokenizer | None) -> int:
    """The id given, or the tokenizer's [MASK] or first extra id, or without a tokenizer the last of the vocabulary; -1
    where there is none.
    """
    if config.mask_token_id >= 0:
        return config.mask_token_id
    if tokenizer is None:
        return model.vocab_size - 1
    own = getattr(tokenizer, "mask", None)
    return int(own) if own is not None else int(next(iter(getattr(tokenizer, "extra_ids", ())), -1))


def _no_mask(config: DataConfig, model: Words, mask: int, tokenizer: Tokenizer | None) -> Problem:
    case = f"the vocabulary has the ids 0 to {model.vocab_size - 1}"
    if config.mask_token_id < 0:
        case = f"family {model.family} needs an id that stands for a masked word, and the tokenizer has no [MASK]"
    fix = "--vocab-extra-ids 1, which puts one behind the vocabulary, or --mask-token-id with an id that texts lack"
    return Problem(f"--family {model.family} --mask-token-id {config.mask_token_id}", case, fix)
