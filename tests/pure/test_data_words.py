"""Masked words: which are chosen, what becomes of them, and that it depends on the seed and a sample's number alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.errors import Refused
from isotron.core.models.bert_config import BertConfig
from isotron.data.build import build_datasets
from isotron.data.config import DataConfig
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.masking import masking
from isotron.data.words import WordMasking, masked_row

MODEL = BertConfig(vocab_size=1000)
HOW = WordMasking(24, (101,), (102,), 103, (0, 101, 102, 103), 1000, 0.15, 0.8, 0.1)
TEXT = np.arange(200, 222)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 300), st.floats(0.01, 0.99), st.booleans(), st.integers(0, 2**20))
def test_what_is_chosen(row: int, share: float, short: bool, seed: int) -> None:
    how = replace(HOW, row=row, share=share, short=1.0 if short else 0.0)
    text = np.random.default_rng(seed).integers(90, 110, how.text)  # some are ids that are never chosen
    found = masked_row(text, how, np.random.default_rng(seed))
    length = row if found.documents is None else int(np.count_nonzero(found.documents == 0))
    assert short == (found.documents is not None) and 4 <= length <= row
    assert found.labels[:length].tolist() == [101, *text[: length - 2], 102] and not found.labels[length:].any()
    chosen, may = np.flatnonzero(found.loss), np.flatnonzero(~np.isin(found.labels[:length], how.kept))
    assert set(chosen) <= set(may.tolist()) and len(chosen) == min(max(round(len(may) * share), 1), len(may))
    assert np.array_equal(np.delete(found.tokens, chosen), np.delete(found.labels, chosen))


def test_what_becomes_of_them() -> None:
    """Of 150 in 1000 words 80% are the mask, 10% any word, 10% stay; every place is chosen as often as any other."""
    how = replace(HOW, row=1002, vocabulary=50_000)
    text = np.arange(10_000, 11_000)
    rows = [masked_row(text, how, np.random.default_rng(seed)) for seed in range(80)]
    chosen = [(row.tokens[row.loss > 0], row.labels[row.loss > 0]) for row in rows]
    tokens, labels = (np.concatenate(part) for part in zip(*chosen, strict=True))
    assert len(tokens) == 80 * 150
    assert abs(np.mean(tokens == 103) - 0.8) < 0.015 and abs(np.mean(tokens == labels) - 0.1) < 0.012
    drawn = tokens[(tokens != 103) & (tokens != labels)]
    assert abs(np.mean(drawn) / 25_000 - 1) < 0.05
    often = np.sum([row.loss for row in rows], axis=0)[1:-1]
    assert 8 < often.mean() < 16 and often.max() < 30


def test_documents_and_positions() -> None:
    how = replace(HOW, row=12, begin=(), end=(), isolate=9, restart=9)
    found = masked_row(np.array([1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 1]), how, np.random.default_rng(1))
    assert found.documents is not None and found.documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    assert found.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 5]
    short = replace(how, short=1.0, isolate=None)
    cut = masked_row(np.arange(20, 32), short, np.random.default_rng(5))
    assert cut.documents is not None
    length = int(np.count_nonzero(cut.documents == 0))
    assert 2 <= length < 12 and cut.positions.tolist() == [*range(length), *range(12 - length)]
    assert not cut.tokens[length:].any() and not cut.loss[length:].any()


def tokenizer(**ids: Any) -> Any:
    return SimpleNamespace(
        **{"eod": 102, "cls": 101, "sep": 102, "mask": 103, "pad": 0, "bos": None, "eos": None, **ids}
    )


def test_what_stands_for_what() -> None:
    config = DataConfig(seq_length=24)
    assert masking(config, MODEL, tokenizer()) == HOW
    plain = masking(config, MODEL, tokenizer(cls=None, mask=None, extra_ids=(999,)))
    assert (plain.begin, plain.end, plain.text, plain.mask) == ((), (), 24, 999)  # type: ignore[union-attr]
    assert masking(replace(config, mask_token_id=7), MODEL, tokenizer()).mask == 7  # type: ignore[union-attr]
    assert masking(config, MODEL, None).mask == 999  # type: ignore[union-attr]
    with pytest.raises(Refused, match="no \\[MASK\\](.|\n)*--vocab-extra-ids 1"):
        masking(config, MODEL, tokenizer(mask=None))
    with pytest.raises(Refused, match="ids 0 to 999"):
        masking(replace(config, mask_token_id=1000), MODEL, tokenizer())
    with pytest.raises(Refused, match="--reset-attention-mask(.|\n)*no end-of-document id"):
        masking(replace(config, reset_attention_mask=True), MODEL, None)


def test_samples_depend_on_seed_and_number_alone(tmp_path: Any) -> None:
    random = np.random.default_rng(1)
    for name in "ab":
        with IndexedWriter(str(tmp_path / name), 900) as writer:
            for length in random.integers(20, 200, 30):
                writer.add_document(random.integers(110, 900, length))
    config = DataConfig((f"{tmp_path}/a", f"{tmp_path}/b"), seq_length=40, split="80,20,0", short_seq_prob=0.5)
    how = masking(config, MODEL, tokenizer())

    def samples(seed: int, order: list[int]) -> list[Any]:
        train, valid = build_datasets(config, seed, (300, 8), lambda _: None, vocab_size=1000, masking=how)
        assert train is not None and valid is not None and len(train) == 300
        return [vars(train[i]) for i in order] + [vars(valid[i]) for i in range(3)]

    first, again, other = samples(3, list(range(250))), samples(3, list(range(250))[::-1]), samples(4, list(range(250)))
    for i in range(250):
        assert all(np.array_equal(first[i][k], again[249 - i][k]) for k in first[i])
    assert not all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(first, other, strict=True))
    same = how.dataset([TEXT] * 2, 3, 0)  # type: ignore[union-attr]
    assert not np.array_equal(same[0].tokens, same[1].tokens)  # another epoch masks other words of a text
