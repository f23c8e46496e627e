"""The float64 matrix: every layout against one process; loss, norm, every gradient, weights after five steps.

Pairs of features are covered here; `--slow` runs the full product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from isotron.train.verify import measure
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import AXES, LAYOUTS, case_of, faults, legal, reference_of

PAIRS = covering(AXES, legal)
REST = [choice for choice in product_of(AXES, legal) if choice not in PAIRS]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def world_of(choice: Choice) -> int:
    return case_of(choice).layout.world


def name_of(choice: Choice) -> str:
    short = {"microbatch": "mb", "zero": "zero", "overlap": "overlap"}
    return "-".join(f"{short[k]}{int(v)}" if k in short else str(v) for k, v in choice.items())


def check(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    case = case_of(choice)
    found = ranks(case.layout.world, measure, case, timeout=120)[0]
    bad = faults(found, reference_of(case))
    assert not bad, f"{name_of(choice)}: {len(bad)} rows differ from one process, worst first\n" + "\n".join(bad[:8])


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
    check(ranks, rest)
