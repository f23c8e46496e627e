"""Masked spans: lengths as T5's own, samples that give the text back, numbers that depend on nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.errors import Refused
from isotron.core.models.t5_config import T5Config
from isotron.data.build import build_datasets
from isotron.data.config import DataConfig
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.masking import masking
from isotron.data.spans import Lengths, Masking, SpanDataset, lengths_of, pair, plan

MODEL = T5Config(vocab_size=1000)


def test_lengths_are_those_that_are_published() -> None:
    """Raffel et al. 2020, section 3.1.4, and the published code: 512 tokens are cut from 568, and 114 are written."""
    assert plan(512, 0.15, 3.0) == Lengths(568, 85, 28)
    assert (plan(512, 0.15, 3.0).source, plan(512, 0.15, 3.0).target) == (512, 114)
    assert plan(3, 0.15, 3.0) == Lengths(2, 1, 1) and plan(3, 0.15, 3.0).source == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 700), st.floats(0.01, 0.9), st.floats(1.0, 12.0), st.integers(0, 2**20))
def test_the_text_comes_back(source: int, share: float, mean: float, seed: int) -> None:
    lengths = plan(source, share, mean)
    assert lengths.source <= source < lengths_of(lengths.text + 1, share, mean).source
    sentinels = tuple(range(10_000, 10_000 + lengths.spans))
    how = Masking(lengths, source, lengths.target + 3, sentinels, end=7777, start=8888)
    text = np.arange(lengths.text, dtype=np.int64)
    found = pair(text, how, np.random.default_rng(seed))
    assert found.tokens[0] == 8888 and np.array_equal(
        found.tokens[1 : lengths.target], found.labels[: lengths.target - 1]
    )
    assert found.loss.tolist() == [1.0] * lengths.target + [0.0] * 3 and len(found.source) == source
    assert found.source[found.length - 1] == 7777 == found.labels[lengths.target - 1]
    written = np.split(found.labels[: lengths.target - 1], np.flatnonzero(found.labels[: lengths.target - 1] >= 10_000))
    spans = {int(s[0]): s[1:].tolist() for s in written[1:]}
    assert list(spans) == list(sentinels) and all(spans.values()) and not len(written[0])
    read = found.source[: found.length - 1].tolist()
    assert [i for i in read if i >= 10_000] == list(sentinels)
    back = [i for token in read for i in (spans[token] if token >= 10_000 else [token])]
    assert back == text.tolist() and not found.source[found.length :].any()


def test_every_way_of_cutting_is_as_likely() -> None:
    how = Masking(Lengths(6, 3, 2), 8, 8, (90, 91), 1, 0)
    text = np.arange(10, 16)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(800):
        found = tuple(pair(text, how, np.random.default_rng(seed)).source.tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 4 and all(150 < n < 250 for n in counts.values())  # 2 ways for what is masked, 2 for the rest


def tokenizer(**ids: Any) -> Any:
    return SimpleNamespace(**{"eod": 5, "eos": None, "extra_ids": tuple(range(999, 959, -1)), **ids})


def test_what_stands_for_what() -> None:
    config = DataConfig(seq_length=64)
    assert masking(config, object(), tokenizer()) is None
    own = masking(config, MODEL, tokenizer())
    assert own is not None and (own.end, own.start) == (5, 0) and own.sentinels == (999, 998, 997)
    assert own.target == 16 and own.lengths.target == 14 and own.lengths.source == 64  # in eights, unless it is given
    assert masking(config, MODEL, tokenizer(eos=1)).end == 1  # type: ignore[union-attr]
    assert masking(config, MODEL, None).sentinels == (999, 998, 997)  # type: ignore[union-attr]
    given_ids = DataConfig(seq_length=64, sentinel_ids=(3, 4, 5, 6, 7))
    assert masking(given_ids, MODEL, tokenizer()).sentinels == (3, 4, 5)  # type: ignore[union-attr]
    for ids in ((3, -4, 5), (5, 5, 5)):
        with pytest.raises(Refused, match="each another id"):
            masking(DataConfig(seq_length=64, sentinel_ids=ids), MODEL, None)
    for how, reads in ((config, tokenizer(extra_ids=())), (DataConfig(seq_length=64, sentinel_ids=(1, 2, 1000)), None)):
        with pytest.raises(Refused, match="--seq-length 64(.|\n)*3 sentinels below 1000(.|\n)*--vocab-extra-ids 100"):
            masking(how, MODEL, reads)


def test_samples_depend_on_seed_and_number_alone(tmp_path: Any) -> None:
    random = np.random.default_rng(1)
    for name in "ab":
        with IndexedWriter(str(tmp_path / name), 900) as writer:
            for length in random.integers(20, 200, 30):
                writer.add_document(random.integers(10, 900, length))
    config = DataConfig((f"{tmp_path}/a", f"{tmp_path}/b"), seq_length=40, split="80,20,0")
    how = masking(config, MODEL, tokenizer())

    def samples(seed: int, order: list[int]) -> list[Any]:
        train, valid = build_datasets(config, seed, (300, 8), lambda _: None, vocab_size=1000, masking=how)
        assert train is not None and valid is not None and len(train) == 300
        return [vars(train[i]) for i in order] + [vars(valid[i]) for i in range(3)]

    first, again, other = samples(3, list(range(280))), samples(3, list(range(280))[::-1]), samples(4, list(range(280)))
    for i in range(280):
        assert all(np.array_equal(first[i][k], again[279 - i][k]) for k in first[i])
    assert not all(np.array_equal(a["source"], b["source"]) for a, b in zip(first, other, strict=True))
    same = SpanDataset([np.arange(how.lengths.text)] * 2, how, 3, 0)  # type: ignore[union-attr, arg-type]
    assert not np.array_equal(same[0].source, same[1].source)  # another epoch masks other tokens of a text
    with pytest.raises(Refused, match=r"--seq-length 9000(.|\n)*one sample takes"):
        far = DataConfig((f"{tmp_path}/a",), seq_length=9000, split="1")
        many = masking(far, MODEL, tokenizer(extra_ids=tuple(range(900))))
        build_datasets(far, 1, (3, 0), lambda _: None, vocab_size=1000, masking=many)
