"""Encoders: every layout, context parallelism without a causal mask among them, against one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isotron.config.schema import PRESETS, RunConfig
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.plan import Layout
from isotron.train.selfcheck import scaled_case
from tests.bert_matrix import AXES, case_of, legal
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import equals_one_process, scheduled

Ranks = Callable[..., list[Any]]
PAIRS = covering(AXES, legal)
# in every run: layouts that have the parts of the others in them, what they are tried with going round
ALWAYS = ("TP2+SPxPP2-uneven", "TP2-zb-h1", "PP2xDP2-zbv", "CP2", "CP4", "CP2xTP2+SP")
TURNS = [
    {
        axis: values[n // turn % len(values)]
        for axis, values, turn in zip(AXES, AXES.values(), (1, 1, 2, 1, 1, 1), strict=True)
    }
    for n in range(len(AXES["layout"]))
]
QUICK = [c if legal(c) else {**c, "zero": 1} for c in TURNS if c["layout"] in ALWAYS]
SLOW = [choice for choice in PAIRS if choice not in QUICK]
REST = [choice for choice in product_of(AXES, legal) if choice not in PAIRS]
PLAIN: Choice = {"layout": "PP4", "model": "post", "rows": "whole", "microbatch": 1, "zero": 1, "recompute": "none"}

pytestmark = pytest.mark.usefixtures("one_thread")


def world_of(choice: Choice) -> int:
    return case_of(choice).layout.world


def name_of(choice: Choice) -> str:
    return "-".join(map(str, choice.values()))


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == set()


@pytest.mark.parametrize("choice", sorted(QUICK, key=world_of), ids=name_of)
def test_every_layout(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


VERIFIED = Layout(tp=2, pp=2, dp=1, sequence_parallel=True, layer_split="balanced")


def test_what_verify_makes_of_a_run() -> None:
    """The published shape, scaled down; types of tokens are drawn too."""
    case = scaled_case(RunConfig(model=PRESETS["bert-large"], layout=VERIFIED))
    assert (case.model.num_layers, case.types, case.model.norm_placement) == (4, 2, "post")
    assert case.model.hidden_dropout and case.model.attention_dropout and case.model.tie_embeddings


@pytest.mark.slow
def test_what_verify_runs(ranks: Ranks) -> None:
    equals_one_process(ranks, scaled_case(RunConfig(model=PRESETS["bert-large"], layout=VERIFIED)), "verify")


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(SLOW, key=world_of), ids=name_of)
def test_pairs(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(REST, key=world_of), ids=name_of)
def test_full_product(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks: Ranks, schedule: str) -> None:
    """The output layer's bias, and the layer before it, where weight gradients wait for actions of their own."""
    case = case_of(PLAIN)
    layout, _ = scheduled(case.layout, schedule)
    equals_one_process(ranks, replace(case, layout=layout, batch_multiples=(1, 2)), schedule)
