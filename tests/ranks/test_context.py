"""Context parallelism against one process: loss, norm, every gradient, weights after two steps, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.context_matrix import AXES, EVERY, case_of, legal
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import equals_one_process

PAIRS = covering(AXES, legal)
# in every run: each way of communication with each kind of attention, and heads that four ranks share
FIRST = {(c["comm"], c["model"]): c for c in reversed(PAIRS)}
FIRST |= {(c["comm"], c["model"]): c for c in PAIRS if (c["cp"], c["model"]) == (4, "gqa")}
QUICK = list(FIRST.values())
OTHERS = [choice for choice in covering(EVERY, legal) if choice not in PAIRS]


def name_of(choice: Choice) -> str:
    return "-".join(f"{key}{value}" if key in ("cp", "zero") else str(value) for key, value in choice.items())


def check(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == uncovered([*PAIRS, *OTHERS], EVERY, legal) == set()
    assert all({c[axis] for c in QUICK} == set(values) for axis, values in AXES.items())


@pytest.mark.parametrize("choice", sorted(QUICK, key=lambda c: case_of(c).layout.world), ids=name_of)
def test_every_kind_of_attention(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [c for c in PAIRS if c not in QUICK], ids=name_of)
def test_pairs(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


@pytest.mark.slow
@pytest.mark.parametrize("choice", OTHERS, ids=name_of)
def test_pairs_with_every_stage_of_zero(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["TP2", "TP2+SP", "PP2", "DP2"])
@pytest.mark.parametrize("comm", AXES["comm"])
@pytest.mark.parametrize("model", AXES["model"])
def test_four_ranks_beside_others(ranks: Callable[..., list[Any]], beside: str, comm: str, model: str) -> None:
    for rows in AXES["rows"]:
        check(ranks, {"cp": 4, "comm": comm, "model": model, "rows": rows, "beside": beside, "zero": 1,
                      "recompute": "none"})  # fmt: skip


def test_the_product_is_larger_than_what_is_always_run() -> None:
    assert len(PAIRS) < len(product_of(AXES, legal)) / 4
