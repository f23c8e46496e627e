"""The float64 matrix: every layout against one process; loss, norm, every gradient, weights after some steps.

Pairs of features are covered here in two steps; `--slow` runs the full product of them, five steps each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isotron.train.verify import measure
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import AXES, LAYOUTS, case_of, equals_one_process, legal
from tests.ranks.bodies import measured_in_turns, measured_over_gloo

PAIRS = covering(AXES, legal)
WHOLE = {**AXES, "mlp_chunks": (1,), "messages": ("memory",), "halves": (False,)}  # of these the pairs suffice
BODIES = {"memory": measure, "turns": measured_in_turns, "gloo": measured_over_gloo}
REST = [choice for choice in product_of(WHOLE, legal) if choice not in PAIRS]


pytestmark = pytest.mark.usefixtures("one_thread")


def world_of(choice: Choice) -> int:
    return case_of(choice).layout.world


def name_of(choice: Choice) -> str:
    short = {"microbatch": "mb", "zero": "zero", "overlap": "overlap", "mlp_chunks": "chunks", "halves": "halves"}
    return "-".join(f"{short[k]}{int(v)}" if k in short else str(v) for k, v in choice.items())


def check(ranks: Callable[..., list[Any]], choice: Choice, steps: int = 2) -> None:
    equals_one_process(ranks, case_of(choice, steps), name_of(choice), BODIES[choice["messages"]])


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == set()
    assert {choice["layout"] for choice in PAIRS} == set(LAYOUTS)


@pytest.mark.parametrize("choice", sorted(PAIRS, key=world_of), ids=name_of)
def test_pairs(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rest" in metafunc.fixturenames:  # thousands of cases, made only when they are to run
        slow = metafunc.config.getoption("--slow")
        metafunc.parametrize("rest", sorted(REST, key=world_of) if slow else [], ids=name_of if slow else None)


@pytest.mark.slow
def test_full_product(ranks: Callable[..., list[Any]], rest: Choice) -> None:
    check(ranks, rest, steps=5)
