"""Masked spans: samples for a model with an encoder and a decoder, cut from the same texts as any other. PURE.

A stretch of text loses spans of a share of its tokens. The encoder reads what is left, with a sentinel in the place of
each span; the decoder writes each sentinel and the span behind it; both end with the end of sequence. Spans and what
lies between them have at least one token, and every way of cutting them is as likely as any other. A sample is a
function of (seed, part, its number): another epoch masks other tokens. Source: Raffel et al. 2020 (T5), section 3.1.4
and 3.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse
from isotron.data.config import DataConfig
from isotron.data.rows import Pair, Tokens
from isotron.tokenizers.base import Tokenizer

END = 1  # the end of sequence where there is no tokenizer, as T5's has it
UNIT = 8  # the decoder's rows are a multiple of this unless their length is given


class Pairs(Protocol):
    """What a family with an encoder and a decoder says of its rows."""

    @property
    def decoder_seq_length(self) -> int:
        """Tokens of a row of the decoder."""
        ...

    @property
    def decoder_start_token_id(self) -> int:
        """What the decoder reads first."""
        ...

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Tokens of a stretch of text, how many of them are masked, and in how many spans."""

    text: int
    masked: int
    spans: int

    @property
    def source(self) -> int:
        """Tokens that the encoder reads."""
        return self.text - self.masked + self.spans + 1

    @property
    def target(self) -> int:
        """Tokens that the decoder writes."""
        return self.masked + self.spans + 1


@dataclass(frozen=True)
class Masking:
    """How stretches become pairs: their lengths, the rows that hold a pair, and the ids that stand for something."""

    lengths: Lengths
    source: int
    target: int
    sentinels: tuple[int, ...]
    end: int
    start: int

    @property
    def text(self) -> int:
        """Tokens of a stretch."""
        return self.lengths.text

    def dataset(self, texts: Any, seed: int, part: int) -> SpanDataset:
        """Pairs from a dataset of stretches."""
        return SpanDataset(texts, self, seed, part)


def lengths_of(text: int, share: float, mean: float) -> Lengths:
    """What a stretch of `text` tokens is cut into."""
    masked = min(max(round(text * share), 1), text - 1)
    return Lengths(text, masked, min(max(round(masked / mean), 1), masked, text - masked))


def plan(source: int, share: float, mean: float) -> Lengths:
    """The longest stretch whose pair fits into rows of `source` tokens of the encoder (3 at least)."""
    most = int(source / (1 - share)) + 2  # what is not masked is read
    longer = bisect_right(range(3, most + 1), source, key=lambda text: lengths_of(text, share, mean).source)
    return lengths_of(2 + longer, share, mean)


def target_length(config: DataConfig) -> int:
    """Tokens of a row of the decoder that holds what is masked of `seq_length` tokens."""
    needed = plan(config.seq_length, config.mask_prob, config.mean_span_length).target
    return -(-needed // UNIT) * UNIT


def span_masking(config: DataConfig, pairs: Pairs, tokenizer: Tokenizer | None) -> Masking:
    """How the data of a run are masked; refused without enough sentinels."""
    lengths = plan(config.seq_length, config.mask_prob, config.mean_span_length)
    sentinels = _sentinels(config, pairs, tokenizer, lengths.spans)
    eos = END if tokenizer is None else tokenizer.eod if tokenizer.eos is None else tokenizer.eos
    rows = config.seq_length, pairs.decoder_seq_length or target_length(config)
    return Masking(lengths, *rows, sentinels, eos, pairs.decoder_start_token_id)


def _sentinels(config: DataConfig, model: Pairs, tokenizer: Tokenizer | None, count: int) -> tuple[int, ...]:
    """Ids given, or the tokenizer's, or without a tokenizer the last of the vocabulary backwards."""
    own: Sequence[int] = getattr(tokenizer, "extra_ids", ())
    if tokenizer is None:
        own = range(model.vocab_size - 1, max(model.vocab_size - 1 - count, END), -1)
    found = tuple(config.sentinel_ids or own)
    if len(found) < count or len(set(found)) < len(found) or not all(0 <= i < model.vocab_size for i in found):
        which = "sentinel_ids" if config.sentinel_ids else "the tokenizer" if tokenizer else "the vocabulary"
        has = f"{len(found)}, from {min(found)} to {max(found)}" if found else "none"
        need = f"{count} spans of a row take {count} sentinels below {model.vocab_size}, each another id"
        raise refuse(
            f"--seq-length {config.seq_length} --mask-prob {config.mask_prob:g} --sentinel-ids "
            f"{','.join(map(str, config.sentinel_ids)) or '(none)'}",
            f"{need}, and {which} has {has}",
            f"--vocab-extra-ids {max(100, count)}, or --sentinel-ids with {count} ids of the vocabulary",
        )
    return found[:count]


class SpanDataset:
    """Pairs from a dataset of stretches; `part` 0 is training, 1 validation."""

    def __init__(self, texts: Any, how: Masking, seed: int, part: int) -> None:
        self.texts, self.how, self.seed, self.part = texts, how, seed, part

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Pair:
        random = np.random.default_rng((self.seed, self.part, index))
        return pair(self.texts[index][: self.how.lengths.text], self.how, random)


def pair(text: Tokens, how: Masking, random: np.random.Generator) -> Pair:
    """One stretch with spans masked."""
    lengths = how.lengths
    masked = _cut(lengths.masked, lengths.spans, random)
    kept = _cut(lengths.text - lengths.masked, lengths.spans, random)
    read: list[Tokens] = []
    written: list[Tokens] = []
    at = 0
    for keep, mask, sentinel in zip(kept.tolist(), masked.tolist(), how.sentinels, strict=True):
        mark = np.array([sentinel], dtype=np.int64)
        read += [text[at : at + keep], mark]
        written += [mark, text[at + keep : at + keep + mask]]
        at += keep + mask
    end = np.array([how.end], dtype=np.int64)
    labels = np.concatenate([*written, end])
    tokens = np.concatenate([np.array([how.start], dtype=np.int64), labels[:-1]])
    source = np.concatenate([*read, end])
    loss: npt.NDArray[np.float32] = np.zeros(how.target, dtype=np.float32)
    loss[: len(labels)] = 1.0
    rows = _filled(source, how.source), len(source), _filled(tokens, how.target), _filled(labels, how.target)
    return Pair(*rows, loss)


def _cut(total: int, parts: int, random: np.random.Generator) -> Tokens:
    """`total` as a sum of `parts` numbers of 1 or more, each way as likely as any other."""
    borders = 1 + np.sort(random.choice(total - 1, parts - 1, replace=False)) if parts > 1 else np.empty(0)
    return np.diff(np.concatenate(([0], borders, [total]))).astype(np.int64)


def _filled(ids: Tokens, length: int) -> Tokens:
    row: Tokens = np.zeros(length, dtype=np.int64)
    row[: len(ids)] = ids
    return row
