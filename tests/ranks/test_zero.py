"""Sharded data parallelism: the matrix against one process, bitwise equalities, and what is alive when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from isotron.train.verify import Case, measure
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import faults, reference_of
from tests.ranks.bodies import build
from tests.ranks.zero_bodies import gathered_peaks, open_gradients, trained_bits, two_groups
from tests.zero_matrix import AXES, FROZEN, case_of, legal

PAIRS = covering(AXES, legal)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def name_of(choice: Choice) -> str:
    return "-".join(f"{k}:{v}" for k, v in choice.items())


def check(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    case = case_of(choice)
    found = ranks(case.layout.world, measure, case, timeout=120)[0]
    bad = faults(found, reference_of(case))
    assert not bad, f"{name_of(choice)}: {len(bad)} rows differ from one process, worst first\n" + "\n".join(bad[:8])


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == set()


@pytest.mark.parametrize("choice", sorted(PAIRS, key=lambda c: case_of(c).layout.world), ids=name_of)
def test_pairs(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rest" in metafunc.fixturenames:  # a thousand cases, made only when they are to run
        slow = metafunc.config.getoption("--slow")
        rest = [c for c in product_of(AXES, legal) if c not in PAIRS] if slow else []
        metafunc.parametrize("rest", rest, ids=name_of if slow else None)


@pytest.mark.slow
def test_full_product(ranks: Callable[..., list[Any]], rest: Choice) -> None:
    check(ranks, rest)


def small(zero: int, **layout: Any) -> Case:
    choice = {"layout": "DP2", "zero": zero, "model": "gpt", "accumulation": 3, "overlap": True, "frozen": False}
    case = case_of({**choice, "recompute": "none"})
    return replace(case, layout=replace(case.layout, **layout))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_overlap_changes_no_bit(ranks: Callable[..., list[Any]], zero: int) -> None:
    case = replace(small(zero), dtype="float32")
    off = replace(case, layout=replace(case.layout, overlap_grad_reduce=False, overlap_param_gather=False))
    assert ranks(2, trained_bits, case) == ranks(2, trained_bits, off)


def test_a_reduction_in_bfloat16_is_another_sum_but_close(ranks: Callable[..., list[Any]]) -> None:
    exact, narrow = small(2), small(2, grad_reduce_dtype="bfloat16")
    a, b = (ranks(2, measure, case)[0] for case in (exact, narrow))
    assert a.norms != b.norms and a.norms == pytest.approx(b.norms, rel=5e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_at_most_a_block_and_the_next_one_are_gathered(ranks: Callable[..., list[Any]], recompute: str) -> None:
    for prefetch in (True, False):
        case = small(3, recompute=recompute, overlap_param_gather=prefetch)
        for peak, units, left in ranks(2, gathered_peaks, case):
            sizes = sorted(units.values())
            allowed = max(a + b for a, b in zip(list(units.values()), list(units.values())[1:], strict=False))
            assert left == 0 and sizes[-1] <= peak <= (allowed if prefetch else sizes[-1])
            assert peak < sum(sizes)


def test_few_buckets_of_gradients_are_open(ranks: Callable[..., list[Any]]) -> None:
    for overlap, buckets in ((True, 2), (False, 1)):
        for most, largest, whole in ranks(2, open_gradients, small(2, overlap_grad_reduce=overlap)):
            assert largest <= most <= (buckets + 2) * largest < whole


def test_a_class_of_parameters_chooses_its_ranks(ranks: Callable[..., list[Any]]) -> None:
    for zero in (1, 3):
        for sums, runs in ranks(4, two_groups, zero):
            assert sums["dense"] == 0 + 1 + 2 + 3 and sums["expert"] == sums["pair"]
            assert runs == {"dense": 6, "expert": 12}


def test_frozen_parameters_have_no_state() -> None:
    case = small(0, dp=1)
    model = build(replace(case, frozen=FROZEN))
    assert {v.placed.name for v in model.views()}.isdisjoint({"embed.weight", "norm.weight"})
    (stage,) = model.stages.values()
    trained = sum(v.box.size for v in model.views())
    assert trained == stage.flat.grads.numel() < stage.flat.weights.numel()
