"""Blocks over stages by cost and by layout string."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.config.schema import PRESETS
from isotron.core.errors import Refused
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.plan import Layout, split_layers
from isotron.core.parallel.split import (
    WORTH,
    LayerCosts,
    balanced_counts,
    counts_of,
    expand,
    halves_of,
    layout_counts,
    model_costs,
    parse_layout,
)


def test_layout_strings() -> None:
    assert expand("Et*3|(tt|)*3,m|L") == "Ettt|tt|tt|tt|m|L"
    stages = parse_layout("Et*3|(tt|)*29,m|L")  # 61 blocks over 32 stages, prediction and loss on their own
    assert len(stages) == 32 and sum(s.blocks for s in stages) == 61
    assert (stages[0].embedding, stages[0].blocks, stages[30].prediction, stages[31].loss) == (1, 3, 1, 1)
    assert layout_counts("E|(t|)*2,tt|L") == [0, 1, 1, 2, 0]
    assert layout_counts("Et*4,L") == [4]


@pytest.mark.parametrize(
    "text, words",
    [
        ("Ett|tt", "ends with the one L"),
        ("tt|EttL", "begins with the one E"),
        ("Ex|L", "x is not one of E, t, m, L"),
        ("Et*|L", r"'\*\|L' is neither"),
        ("Et|(t|*2L", r"'\(t\|\*2L' is neither"),
        ("Et|m|L", "no model family here predicts several tokens"),
    ],
)
def test_broken_strings(text: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        layout_counts(text)


def test_a_layout_string_decides_the_stages() -> None:
    layout = Layout(pp=2, pipeline_layout="Et|tt|tt|L")
    assert (layout.chunks, layout.stages, layout.schedule_name) == (2, 4, "interleaved")
    assert [len(r) for r in split_layers(5, layout)] == [1, 2, 2, 0]
    with pytest.raises(Refused, match="these sum to 5"):
        split_layers(6, layout)


def cost_of(counts: list[int], costs: LayerCosts) -> float:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    sums = [sum(costs.blocks[a : a + n]) for a, n in zip(starts, counts, strict=True)]
    return max(sums[0] + costs.first, sums[-1] + costs.last, *sums)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(2, 4), st.integers(0, 9), st.integers(0, 9))
def test_no_other_split_is_cheaper(blocks: list[int], stages: int, first: int, last: int) -> None:
    costs = LayerCosts(tuple(map(float, blocks)), float(first), float(last))
    counts = balanced_counts(costs, stages)
    assert sum(counts) == len(blocks) and len(counts) == stages
    if len(blocks) < stages:
        return
    assert min(counts) > 0
    for cuts in combinations(range(1, len(blocks)), stages - 1):
        other = [b - a for a, b in zip((0, *cuts), (*cuts, len(blocks)), strict=True)]
        assert cost_of(counts, costs) <= cost_of(other, costs)


def test_blocks_of_an_encoder_and_a_decoder_count_for_their_rows() -> None:
    """T5-base on 512 and 114 tokens: a block of the decoder costs a third of the encoder's, so its stages hold more."""
    model = replace(PRESETS["t5-base"], decoder_seq_length=114)
    costs = model_costs(model)
    encoding, decoding = costs.blocks[0], costs.blocks[-1]
    assert costs.blocks == (encoding,) * 12 + (decoding,) * 12 and costs.last == 114 * 768 * 32128
    d, f = 768, 3072
    assert encoding == 512 * (4 * d * d + 2 * d * f + 2 * d * 512)
    assert decoding == 114 * (4 * d * d + 2 * d * f + 2 * d * (114 + 512)) + 2 * d * d * (114 + 512)
    counts = balanced_counts(costs, 4)
    assert counts[0] < 6 < counts[-1] and sum(counts) == 24
    assert cost_of(counts, costs) < 0.85 * cost_of([6, 6, 6, 6], costs)


def test_the_output_layer_counts() -> None:
    """A wide vocabulary makes the last stage shorter; the input embedding costs nothing."""
    model = LlamaConfig(16, 256, 8, 8, 0, 768, 128_000, 128)
    costs = model_costs(model)
    assert len(set(costs.blocks)) == 1 and costs.first == 0 and costs.last == 128_000 * 256
    counts = [len(r) for r in split_layers(16, Layout(pp=4, layer_split="balanced"), costs)]
    assert sum(counts) == 16 and counts[-1] < min(counts[:-1])
    assert model_costs(GPTConfig(3, 32, 4, vocab_size=131)).blocks[0] > 0
    even = [len(r) for r in split_layers(16, Layout(pp=4, layer_split="balanced"))]
    assert even == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("counts", "halves"),
    [
        ((6.5, 1.5), [("",) * 6 + ("attention",), ("mlp", "")]),
        ((0.5, 0.5), [("attention",), ("mlp",)]),
        ((1.5, 0, 0.5, 1), [("", "attention"), (), ("mlp",), ("",)]),  # an empty stage in the middle of a block
        ((0, 1.5, 1.5, 0), [(), ("", "attention"), ("mlp", ""), ()]),
        ((2, 1), [("", ""), ("",)]),
    ],
)
def test_a_block_of_two_stages_is_cut_between_them(counts: tuple[float, ...], halves: list[tuple[str, ...]]) -> None:
    split = split_layers(int(sum(counts)), Layout(pp=len(counts), layers_per_stage=counts))
    assert [halves_of(split, s) for s in range(len(split))] == halves
    assert tuple(counts_of(split)) == counts


@pytest.mark.parametrize(
    ("family", "counts", "words"),
    [
        ("neox-tiny", (1.5, 2.5), "are not cut"),
        ("t5-tiny", (1.5, 2.5), "are not cut"),
        ("llama-tiny", (1.25, 2.75), "halves of blocks"),
        ("llama-tiny", (1.5, 2), "these sum to 3.5"),
    ],
)
def test_blocks_that_cannot_be_cut(family: str, counts: tuple[float, ...], words: str) -> None:
    with pytest.raises(Refused, match=words):
        split_layers(4, Layout(pp=2, layers_per_stage=counts), model_costs(PRESETS[family]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=5), st.integers(2, 3),
       st.integers(0, 20))  # fmt: skip
def test_blocks_are_cut_where_it_pays(blocks: list[tuple[int, int]], stages: int, last: int) -> None:
    whole = LayerCosts(tuple(float(a + b) for a, b in blocks), 0.0, float(last))
    counts = balanced_counts(replace(whole, attention=tuple(float(a) for a, _ in blocks)), stages)
    plain = balanced_counts(whole, stages)
    assert sum(counts) == len(blocks) and len(counts) == stages
    each = [float(x) for block in blocks for x in block]
    least = min(
        max(*sums[:-1], sums[-1] + last)
        for cuts in combinations(range(1, len(each)), stages - 1)
        for sums in [[sum(each[a:b]) for a, b in zip((0, *cuts), (*cuts, len(each)), strict=True)]]
    )
    if len(blocks) >= stages:
        worth = least <= (1 - WORTH) * cost_of(list(plain), whole)
        found = cost_of([round(2 * n) for n in counts], LayerCosts(tuple(each), 0.0, float(last)))
        assert found == (least if worth else cost_of(list(plain), whole)) and (worth or counts == plain)


def test_scores_take_longer_than_they_multiply() -> None:
    """The head of this model is worth five blocks by its multiply-adds, and less in time."""
    model = LlamaConfig(8, 512, 8, 4, ffn_hidden_size=1408, vocab_size=32000, max_position_embeddings=512)
    costs = model_costs(model)
    assert costs.in_time(cut=True)[:2] == [2 * 512 * (512 + 256) + 2 * 512 * 512, 3 * 512 * 1408]
    assert balanced_counts(costs, 2) == (6.5, 1.5) and balanced_counts(replace(costs, attention=()), 2) == (6, 2)
