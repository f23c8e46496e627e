"""Decoders that see pictures: every layout against one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isotron.core.parallel.pipeline.registry import SCHEDULES
from tests.covering import Case as Choice
from tests.covering import covering, uncovered
from tests.llava_matrix import AXES, case_of, legal
from tests.matrix import equals_one_process, scheduled

Ranks = Callable[..., list[Any]]
PAIRS = covering(AXES, legal)
QUICK = list({c["layout"]: c for c in PAIRS}.values())
SLOW = [choice for choice in PAIRS if choice not in QUICK]
PLAIN: Choice = {"layout": "TP2", "model": "untied", "microbatch": 1, "zero": 1, "recompute": "none"}

pytestmark = pytest.mark.usefixtures("one_thread")


def name_of(choice: Choice) -> str:
    return "-".join(map(str, choice.values()))


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == set()


@pytest.mark.parametrize("choice", QUICK, ids=name_of)
def test_every_layout(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


def test_a_tower_that_is_not_trained(ranks: Ranks) -> None:
    """Stages without a parameter that is trained, and a boundary that no gradient comes back over."""
    case = case_of({**PLAIN, "layout": "PP4-first two see"})
    equals_one_process(ranks, replace(case, frozen=("vision.*", "layers.[012].*")), "frozen tower")


@pytest.mark.slow
@pytest.mark.parametrize("choice", SLOW, ids=name_of)
def test_pairs(ranks: Ranks, choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks: Ranks, schedule: str) -> None:
    """Microbatches of 0, 1 and 2 pictures, of other shapes at every boundary; steps of two sizes."""
    case = case_of(PLAIN)
    layout, _ = scheduled(replace(case.layout, tp=1), schedule)
    equals_one_process(ranks, replace(case, layout=layout, batch_multiples=(1, 2)), schedule)
