"""Sharded data parallelism: the matrix against one process, bitwise equalities, and what is alive when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.config import OptimConfig
from isotron.core.parallel.pipeline.simulate import Costs, simulate
from isotron.core.parallel.plan import Layout
from isotron.planner.live import gathered_elements, open_gradients, summed_elements
from isotron.planner.parameters import count_parameters, rank_stages
from isotron.train.verify import Case, measure
from tests.covering import Case as Choice
from tests.covering import covering, uncovered
from tests.matrix import MODELS, equals_one_process, faults, reference_of
from tests.ranks.bodies import build
from tests.ranks.zero_bodies import (
    built_from_nothing,
    drawn_module,
    gather_counts,
    gathered_peaks,
    offloaded_bits,
    opened_gradients,
    states_of_stages,
    trained_bits,
    two_groups,
)
from tests.zero_matrix import AXES, FROZEN, case_of, legal
from tests.zero_matrix import MODELS as ZERO_MODELS

PAIRS = covering(AXES, legal)


pytestmark = pytest.mark.usefixtures("one_thread")


def name_of(choice: Choice) -> str:
    return "-".join(f"{k}:{v}" for k, v in choice.items())


def check(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == set()


@pytest.mark.parametrize("choice", sorted(PAIRS, key=lambda c: case_of(c).layout.world), ids=name_of)
def test_pairs(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rest" in metafunc.fixturenames:  # sought only when they are to run
        slow = metafunc.config.getoption("--slow")
        rest = [c for c in covering(AXES, legal, size=3) if c not in PAIRS] if slow else []
        metafunc.parametrize("rest", rest, ids=name_of if slow else None)


@pytest.mark.slow
def test_every_three_features_together(ranks: Callable[..., list[Any]], rest: Choice) -> None:
    check(ranks, rest)


def small(zero: int, **layout: Any) -> Case:
    choice = {"layout": "DP2", "zero": zero, "model": "gpt", "accumulation": 3, "overlap": True, "frozen": False}
    case = case_of({**choice, "recompute": "none", "offload": False, "live": 0})
    return replace(case, layout=replace(case.layout, **layout))


@pytest.mark.parametrize(("zero", "more"), [(1, {}), (2, {"max_live_gradients": 20_000, "pp": 2, "vpp": 2}), (3, {})])
def test_overlap_changes_no_bit(ranks: Callable[..., list[Any]], zero: int, more: dict[str, int]) -> None:
    case = replace(small(zero, **more), dtype="float32")
    off = replace(case, layout=replace(case.layout, overlap_grad_reduce=False, overlap_param_gather=False))
    world = case.layout.world
    assert ranks(world, trained_bits, case) == ranks(world, trained_bits, off)


@pytest.mark.parametrize("zero", [1, 3])
def test_offload_changes_no_bit(ranks: Callable[..., list[Any]], zero: int, tmp_path: Path) -> None:
    part = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}
    disk = {**part, "optimizer_offload_fraction": 1.0, "offload_dir": str(tmp_path), "offload_weights": zero == 3}
    grads = {**disk, "offload_dir": "", "offload_gradients": True}
    rules = (
        ("float32", OptimConfig()),
        ("bfloat16", OptimConfig(exp_avg_sq_dtype="int8")),
        ("bfloat16", OptimConfig(optimizer="muon")),
    )
    for dtype, optim in rules if zero == 3 else rules[1:2]:
        places = [{}, part, disk, *([grads] if zero == 3 and optim.optimizer != "muon" else [])]
        cases = [replace(small(zero, **where), dtype=dtype, optim=optim) for where in places]
        for nowhere, there, mapped, *others in ranks(2, offloaded_bits, cases):
            assert all(found.bits == nowhere.bits for found in (there, mapped, *others))
            assert nowhere.host == 0 and 0.5 < there.host / nowhere.all < 0.8 and mapped.host == mapped.all
            assert nowhere.groups == 0 and there.groups > 2
            assert mapped.filed == (zero == 3) and not there.filed
    assert not list(tmp_path.iterdir())  # files have no names


def test_state_loads_into_any_stage(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    whole = {"optimizer_cpu_offload": True, "offload_weights": True}
    copies = {"dp": 4, "zero_shard_size": 2}
    cases = [small(0, dp=4), small(1, dp=4), small(2, **copies), small(3, **copies), small(3, dp=4, **whole)]
    cases = [replace(c, dtype="bfloat16", micro_batch=1) for c in cases]
    for first, *others in ranks(4, states_of_stages, cases, str(tmp_path))[:1]:
        assert {n.split("/")[0] for n in first} >= {"master", "exp_avg", "exp_avg_sq"}
        assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("dtype", "model", "narrow", "layout"),
    [
        ("float64", "gpt", {"grad_reduce_dtype": "bfloat16"}, {"dp": 2, "zero": 2}),
        ("bfloat16", "gpt", {"main_grads_dtype": "bfloat16"}, {"dp": 2, "zero": 2}),
        ("bfloat16", "gpt", {"main_grads_dtype": "bfloat16", "grad_reduce_dtype": "float32"}, {"dp": 2, "zero": 1}),
        ("float16", "llama", {"main_grads_dtype": "float16"}, {"tp": 2, "dp": 1, "sequence_parallel": True, "zero": 0}),
        ("bfloat16", "experts", {"main_grads_dtype": "bfloat16"}, {"pp": 2, "dp": 1, "schedule": "zb-h1", "zero": 0}),
    ],
)
def test_gradients_in_16_bits_are_other_sums_but_close(
    ranks: Callable[..., list[Any]], dtype: str, model: str, narrow: dict[str, Any], layout: dict[str, Any]
) -> None:
    """Of three microbatches; a sum of m numbers in bfloat16 is off by at most m / 2 parts in 256 of their sizes."""
    cases = [replace(small(**layout, **more), model=ZERO_MODELS[model], dtype=dtype, steps=1) for more in ({}, narrow)]
    a, b = (ranks(2, measure, case)[0] for case in cases)
    assert a.norms != b.norms and a.norms == pytest.approx(b.norms, rel=5e-3)
    for name, exact in a.gradients.items():
        assert float((exact - b.gradients[name]).norm()) <= 1e-2 * float(exact.norm()) + 1e-3 * a.norms[0], name


@pytest.mark.parametrize(
    ("method", "model", "layout"),
    [
        ("muon", "gpt", {"dp": 4, "zero_shard_size": 2, "zero": 1}),
        ("muon", "experts", {"dp": 4, "ep": 2, "zero": 3}),
        ("adafactor", "gpt", {"dp": 4, "zero_shard_size": 2, "zero": 3}),
        ("adafactor", "gpt", {"pp": 2, "dp": 2, "zero": 2}),  # a tie whose two owners see other ranks
        ("adafactor", "experts", {"dp": 4, "ep": 2, "zero": 1}),
    ],
)
def test_whole_matrices_in_copies_over_stages_and_of_experts(
    ranks: Callable[..., list[Any]], method: str, model: str, layout: dict[str, Any]
) -> None:
    optim = OptimConfig(optimizer=method, clip_grad=1.0, adam_eps=1e-6, adafactor_eps=1e-6)
    case = replace(small(**layout), model=ZERO_MODELS[model], optim=optim, micro_batch=1)
    found = ranks(4, measure, case)[0]
    assert not faults(found, reference_of(case)) and not found.differing


@pytest.mark.parametrize(("model", "recompute"), [("gpt", "none"), ("llama", "full"), ("predictions", "none")])
def test_at_most_a_block_and_the_next_one_are_gathered(
    ranks: Callable[..., list[Any]], model: str, recompute: str
) -> None:
    for prefetch in (True, False):
        case = replace(small(3, recompute=recompute, overlap_param_gather=prefetch), model=ZERO_MODELS[model])
        (part,) = rank_stages(case.model, case.layout, 0)
        planned = {name: 8 * size for name, size in gathered_elements(part).items()}
        for peak, units, left in ranks(2, gathered_peaks, case):
            sizes = sorted(units.values())
            allowed = max(a + b for a, b in zip(list(units.values()), list(units.values())[1:], strict=False))
            assert left == 0 and sizes[-1] <= peak <= (allowed if prefetch else sizes[-1])
            assert peak < sum(sizes)
            assert model != "llama" or units == planned  # where no unit shares its weights with another


def test_nobody_holds_a_whole_model_while_it_is_built(ranks: Callable[..., list[Any]]) -> None:
    config = LlamaConfig(6, 256, 4, 4, 0, 512, 1000, 16)
    whole = count_parameters(config) * 4
    tiles = 5 * 256 * 256 * 4  # of random numbers, while they are drawn
    for peak, stays, unit in ranks(8, built_from_nothing, replace(small(3), model=config, layout=Layout(dp=8, zero=3))):
        assert stays <= peak <= stays + unit + tiles < whole / 2
    alone = drawn_module(0)
    for peak, stays, unit, losses in ranks(8, drawn_module, 3):
        assert stays <= peak <= stays + 2 * unit < alone[1] / 2  # a unit of one matrix, which is drawn as a whole
        assert losses == pytest.approx(alone[3], rel=1e-9)


def test_weights_that_stay_are_gathered_once(ranks: Callable[..., list[Any]]) -> None:
    case = replace(small(3), model=MODELS["llama"])  # three microbatches, nothing tied
    (often, no_backward, stage), (once, _, _) = (
        ranks(2, gather_counts, replace(case, layout=replace(case.layout, max_live_parameters=live)))[0]
        for live in (0, 10**9)
    )
    assert often == 3 * (2 * stage - no_backward) and once == stage
    pipeline = replace(case, layout=replace(case.layout, pp=2, vpp=2, max_live_parameters=1))
    counts = []
    for live in (1, 20_000, 10**9):
        case = replace(pipeline, layout=replace(pipeline.layout, max_live_parameters=live))
        counts.append(ranks(4, gather_counts, case)[0][0])
    assert counts[0] > counts[1] > counts[2] == ranks(4, gather_counts, case)[0][2]


@pytest.mark.parametrize(
    ("schedule", "vpp", "model"), [("1f1b", 1, "llama"), ("interleaved", 2, "gpt"), ("zbv", 2, "llama")]
)
def test_open_gradients_are_those_of_the_table(
    ranks: Callable[..., list[Any]], schedule: str, vpp: int, model: str
) -> None:
    """At every operation, to the byte; what is reduced as the simulator counts it."""
    before = []
    for budget in (0, 20_000, 10**9):
        axes = {"pp": 2, "vpp": 1 if schedule == "zbv" else vpp, "schedule": schedule, "max_live_gradients": budget}
        case = replace(small(2, overlap_grad_reduce=False, **axes), model=MODELS[model])
        found = ranks(4, opened_gradients, case)
        for at, opened in enumerate(found):
            rank = at // 2
            parts = rank_stages(case.model, case.layout, rank)
            assert opened.stages == {p.number: summed_elements(p) for p in parts}
            table = case.layout.table(3, gradients=opened.stages)
            sizes = [opened.stages.get(s, 0) for s in range(table.stages)]
            report = simulate(table, Costs(gradients=sizes))
            assert opened.peak == 8 * open_gradients(table.ranks[rank], parts, table.stages - 1), (budget, at)
            assert opened.reduced == report.sums[rank] or (schedule == "zbv" and opened.reduced < report.sums[rank])
            assert report.waiting[rank] <= budget  # what the next microbatch's B has formed goes with a REDUCE
            if budget == 10**9 and schedule != "zbv":
                assert opened.peak == 8 * report.waiting[rank] and opened.reduced == sum(opened.stages.values())
        before.append([opened.reduced for opened in found])
    assert all(often >= some >= once and often > once for often, some, once in zip(*before, strict=True))


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_wait_in_interleaved_stages(ranks: Callable[..., list[Any]], zero: int) -> None:
    case = small(zero, pp=2, vpp=2, max_live_gradients=20_000, max_live_parameters=20_000 * (zero == 3))
    found = ranks(4, measure, case)[0]
    assert not faults(found, reference_of(case)) and not found.differing


def test_a_table_of_ones_own_says_when_gradients_are_summed(ranks: Callable[..., list[Any]]) -> None:
    table = Path(__file__).parents[1] / "fixtures" / "sums_chosen.csv"
    case = small(2, pp=2, schedule=str(table))
    found = ranks(4, measure, case)[0]
    assert not faults(found, reference_of(case)) and not found.differing
    for opened in ranks(4, opened_gradients, case):
        assert opened.reduced == 2 * sum(opened.stages.values())


def test_few_buckets_of_gradients_are_open(ranks: Callable[..., list[Any]]) -> None:
    case = replace(small(2), model=MODELS["llama"])
    (part,) = rank_stages(case.model, case.layout, 0)
    planned = 8 * open_gradients(case.layout.table(3, gradients={0: summed_elements(part)}).ranks[0], [part], 0)
    for opened in ranks(2, opened_gradients, case):  # one more than where a sum is waited for
        assert planned <= opened.peak <= planned + 8 * opened.largest < 8 * summed_elements(part)


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
