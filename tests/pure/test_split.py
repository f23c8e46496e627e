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
from isotron.core.parallel.split import LayerCosts, balanced_counts, expand, layout_counts, model_costs, parse_layout


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
