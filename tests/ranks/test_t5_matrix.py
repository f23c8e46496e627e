"""Encoder-decoder models: every layout and pipeline table against one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isotron.config.schema import PRESETS, RunConfig
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.plan import Layout
from isotron.train.selfcheck import scaled_case
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import equals_one_process, scheduled
from tests.t5_matrix import AXES, case_of, legal

Ranks = Callable[..., list[Any]]
PAIRS = covering(AXES, legal)
# in every run: layouts that have the parts of the others in them, and two settings of ZeRO in one of them
ALWAYS = ("TP4+SP", "PP2-uneven", "PP4", "TP2+SPxPP2", "PP2xDP2-zbv", "TP2-zb-h1")
FIRST = {(c["layout"], c["zero"]): c for c in PAIRS if c["layout"] in ALWAYS and c["zero"] in (1, 3)}
QUICK = list(FIRST.values())
SLOW = [choice for choice in PAIRS if choice not in QUICK]
REST = [choice for choice in product_of(AXES, legal) if choice not in PAIRS]
PLAIN: Choice = {"layout": "PP4", "model": "t5", "microbatch": 1, "zero": 1, "recompute": "none"}

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
    """The published shape, scaled down; the encoder's rows are longer."""
    case = scaled_case(RunConfig(model=PRESETS["t5-v1.1-large"], layout=VERIFIED))
    assert (case.model.encoder_num_layers, case.model.decoder_layers, case.source) == (2, 2, 24)
    assert case.model.gated and case.model.hidden_dropout and not case.model.tie_embeddings


@pytest.mark.slow
def test_what_verify_runs(ranks: Ranks) -> None:
    equals_one_process(ranks, scaled_case(RunConfig(model=PRESETS["t5-v1.1-large"], layout=VERIFIED)), "verify")


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(SLOW, key=world_of), ids=name_of)
def test_pairs(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(REST, key=world_of), ids=name_of)
def test_full_product(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks: Ranks, schedule: str, pp: int) -> None:
    """The biases and the embedding live on several stages, some of them on one rank."""
    case = case_of(PLAIN)
    layout, stages = scheduled(replace(case.layout, layers_per_stage=()), schedule, pp)
    layout = replace(layout, layers_per_stage=split_of(stages))
    case = replace(case, layout=layout, batch_multiples=(1, 2), global_batch=4)
    equals_one_process(ranks, case, f"{schedule} on {pp}")


def split_of(stages: int) -> tuple[int, ...]:
    """Six blocks over so many stages: empty ones too, and one with blocks of both sides."""
    return {2: (4, 2), 4: (1, 2, 2, 1), 8: (0, 1, 1, 2, 0, 1, 1, 0)}[stages]
