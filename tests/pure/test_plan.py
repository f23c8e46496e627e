"""Blocks over pipeline stages, and what follows from a layout."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.errors import Refused
from isotron.core.parallel.plan import Layout, split_layers


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3))
def test_an_even_split_covers_the_layers_once(layers: int, pp: int, vpp: int) -> None:
    stages = split_layers(layers, Layout(pp=pp, vpp=vpp))
    assert [i for stage in stages for i in stage] == list(range(layers))
    assert len(stages) == pp * vpp
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "layers, layout, counts",
    [
        (7, Layout(pp=3), [2, 3, 2]),  # the odd block goes to the middle
        (5, Layout(pp=2), [3, 2]),
        (6, Layout(pp=4), [1, 2, 2, 1]),
        (3, Layout(pp=4), [1, 1, 1, 0]),
        (8, Layout(pp=3, first_stage_layers=2), [2, 3, 3]),
        (8, Layout(pp=3, first_stage_layers=1, last_stage_layers=2), [1, 5, 2]),
        (8, Layout(pp=2, first_stage_layers=3, last_stage_layers=5), [3, 5]),
        (5, Layout(pp=2, layers_per_stage=(0, 5)), [0, 5]),
    ],
)
def test_splits(layers: int, layout: Layout, counts: list[int]) -> None:
    assert [len(stage) for stage in split_layers(layers, layout)] == counts


@pytest.mark.parametrize(
    "layers, layout, words",
    [
        (5, Layout(pp=2, layers_per_stage=(2, 2)), "these sum to 4"),
        (5, Layout(pp=2, layers_per_stage=(2, 2, 1)), "must be 2 counts"),
        (5, Layout(pp=2, layers_per_stage=(6, -1)), "counts >= 0"),
        (5, Layout(pp=3, first_stage_layers=4, last_stage_layers=4), "counts >= 0"),
        (5, Layout(pp=2, first_stage_layers=2, last_stage_layers=2), "these sum to 4"),
    ],
)
def test_a_sum_that_is_off_is_refused(layers: int, layout: Layout, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        split_layers(layers, layout)
    assert "num_layers 5" in str(refused.value) and "--layers-per-stage" in str(refused.value)


def test_what_follows_from_a_layout() -> None:
    assert Layout(tp=2, pp=2, dp=2).world == 8 and Layout(tp=2).world == 2
    assert Layout(dp=2).shards_optimizer and not Layout(dp=2, zero=0).shards_optimizer
    assert not Layout(dp=1, zero=1).shards_optimizer
    assert Layout(pp=2).schedule_name == "1f1b" and Layout(pp=2, vpp=2).schedule_name == "interleaved"
    assert Layout(tp=4).padded_vocab(131) == 512 and Layout(make_vocab_size_divisible_by=1).padded_vocab(131) == 131
