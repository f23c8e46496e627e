"""Models with experts: every layout against one process; losses of all kinds, visits, gradients, biases, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isotron.train.verify import compare, measure
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.matrix import equals_one_process, faults, reference_of
from tests.moe_matrix import AXES, MODELS, PLAIN, case_of, mixtral

PAIRS = covering(AXES)
HALVES: Any = {"overlap_moe_expert_parallel_comm": True}
REST = [choice for choice in product_of(AXES) if choice not in PAIRS]


pytestmark = pytest.mark.usefixtures("one_thread")


def world_of(choice: Choice) -> int:
    return case_of(choice).layout.world


def name_of(choice: Choice) -> str:
    return "-".join(map(str, choice.values()))


def check(ranks: Callable[..., list[Any]], choice: Choice, steps: int = 2) -> None:
    equals_one_process(ranks, case_of(choice, steps), name_of(choice))


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES) == set()


@pytest.mark.parametrize("choice", sorted(PAIRS, key=world_of), ids=name_of)
def test_pairs(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice)


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(REST, key=world_of), ids=name_of)
def test_full_product(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    check(ranks, choice, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "global"])
def test_experts_on_four_ranks_of_each_of_two_stages(ranks: Callable[..., list[Any]], model: str) -> None:
    case = replace(case_of(PLAIN, 5), model=MODELS[model])
    split = replace(case, micro_batch=1, layout=replace(case.layout, pp=2, dp=4, ep=4, zero=1, schedule="1f1b"))
    assert faults(ranks(8, measure, split, timeout=240)[0], reference_of(case)) == []


def test_the_matrix_sees_every_kind_of_term() -> None:
    reported = {name.partition("/")[0] for m in MODELS.values() for step in reference(m).aux for name in step}
    assert reported == {"balance", "z", "max_load", "tokens_per_expert", "dropped", "mtp"}
    assert all(reference(m).aux[0]["dropped/1"] > 0 for m in MODELS.values() if m.moe_expert_capacity_factor)


def reference(model: Any) -> Any:
    return reference_of(replace(case_of(PLAIN), model=model))


def test_the_batch_kind_depends_on_the_microbatch_and_on_nothing_else(ranks: Callable[..., list[Any]]) -> None:
    model = mixtral(moe_router_load_balancing_type="batch")
    case = replace(case_of(PLAIN), model=model)
    one = measure(case)
    split = replace(case, layout=replace(case.layout, tp=2, sequence_parallel=True))
    assert all(row.passes for row in compare(ranks(2, measure, split, timeout=120)[0], one))
    assert any(not row.passes for row in compare(measure(replace(case, micro_batch=1)), one))


def test_context_parallel_ranks_share_sequences_and_experts(ranks: Callable[..., list[Any]]) -> None:
    case = replace(case_of(PLAIN), model=mixtral(moe_shared_expert_intermediate_size=16))
    split = replace(case, layout=replace(case.layout, cp=2, tp=2, ep=4, etp=1, sequence_parallel=True, **HALVES))
    assert faults(ranks(4, measure, split, timeout=120)[0], reference_of(case)) == []


def test_sinkhorn_sees_whole_sequences(ranks: Callable[..., list[Any]]) -> None:
    model = mixtral(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0)
    case = replace(case_of({**PLAIN, "recompute": "selective"}), model=model)
    cut = replace(case.layout, recompute_modules=("mlp",), tp=2, sequence_parallel=True, ep=2, etp=1, **HALVES)
    split = replace(case, layout=cut)
    assert faults(ranks(2, measure, split, timeout=120)[0], reference_of(case)) == []


def test_chunks_of_a_pipeline_send_their_tokens(ranks: Callable[..., list[Any]]) -> None:
    case = replace(case_of(PLAIN), micro_batch=1)
    split = replace(case.layout, pp=2, vpp=2, dp=2, ep=2, layers_per_stage=(1, 1, 1, 0), **HALVES)
    assert faults(ranks(4, measure, replace(case, layout=split), timeout=120)[0], reference_of(case)) == []


@pytest.mark.parametrize("tokens", [1, 15])
def test_shares_of_tokens_may_be_uneven_or_none(ranks: Callable[..., list[Any]], tokens: int) -> None:
    case = replace(case_of(PLAIN), sequence=tokens, micro_batch=1)
    split = replace(case, layout=replace(case.layout, tp=2, ep=2, etp=1, **HALVES))
    assert faults(ranks(2, measure, split, timeout=120)[0], reference_of(case)) == []
