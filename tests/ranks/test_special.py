"""Layouts in unusual situations: masks, microbatch counts, documents, vocabularies, uneven stages, broken sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isotron.core.errors import Refused
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, Measured, measure
from tests.matrix import LAYOUTS, MODELS, faults, reference_of
from tests.ranks import bodies

Ranks = Callable[..., list[Any]]
SLOW = pytest.mark.slow  # the same once more, in another layout or another model
SP_PP_DP = {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True}


def layout(name: str, **changes: Any) -> Layout:
    return Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, **LAYOUTS[name], **changes})


def case(model: str, where: Layout, **changes: Any) -> Case:
    return Case(MODELS[model], where, **{"sequence": 16, "steps": 2, **changes})


def agrees(ranks: Ranks, asked: Case) -> Measured:
    found: Measured = ranks(asked.layout.world, measure, asked)[0]
    bad = faults(found, reference_of(asked))
    assert not bad, "\n".join(bad[:8])
    return found


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, name",
    [
        *(("gpt", "TP2+SP"), ("llama", "PP2"), ("llama", "DP2")),
        *(pytest.param(*more, marks=SLOW) for more in (("gpt", "1"), ("gpt", "TP2xPP2"))),
    ],
)
def test_a_step_without_a_single_token(ranks: Ranks, model: str, name: str) -> None:
    found = agrees(ranks, case(model, layout(name), masked_steps=(1,), steps=3))
    assert found.losses[1] == 0 and found.norms[1] == 0
    assert found.losses[2] > 0


@pytest.mark.parametrize("name", ["PP4", "PP2x2chunks", pytest.param("PP2", marks=SLOW)])
def test_one_microbatch_on_several_stages(ranks: Ranks, name: str) -> None:
    agrees(ranks, case("llama", layout(name), global_batch=1, steps=5))  # sample 3 is all masked


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        pytest.param(name, overlap, marks=() if overlap == (i % 2 == 0) or name == "DP2" else SLOW)
        for i, name in enumerate(("1", "TP2+SP", "PP2", "PP4", "PP2x2chunks", "DP2", "TP2xPP2", "PP2xDP2"))
        for overlap in (True, False)
    ],
)
def test_two_one_three_microbatches_in_successive_steps(ranks: Ranks, name: str, overlap: bool) -> None:
    where = layout(name, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    agrees(ranks, case("gpt", where, global_batch=max(where.dp, 1), batch_multiples=(2, 1, 3), steps=4))


def test_a_batch_that_does_not_divide_is_refused(ranks: Ranks) -> None:
    with pytest.raises(Refused, match=r"micro_batch_size 2 and dp 2(.|\n)*2 x 2 = 4 samples(.|\n)*global batch of 4"):
        ranks(2, measure, case("gpt", layout("DP2"), micro_batch=2, global_batch=6))


@pytest.mark.parametrize(
    "model, name",
    [
        *(("gpt", "TP2xPP2"), ("llama", "TP4+SP"), ("llama", "PP2xDP2")),
        *(pytest.param(*more, marks=SLOW) for more in (("gpt", "TP2"), ("llama", "PP2"))),
    ],
)
def test_documents_that_do_not_see_each_other(ranks: Ranks, model: str, name: str) -> None:
    found = agrees(ranks, case(model, layout(name), isolate=True))
    open_ = reference_of(case(model, layout(name)))
    assert found.losses != open_.losses


@pytest.mark.parametrize(
    "model, name",
    [
        *(("gpt", "TP2+SP"), ("llama", "1"), ("llama", "PP2")),
        *(pytest.param(*more, marks=SLOW) for more in (("gpt", "1"), ("llama", "TP2+SP"), ("gpt", "PP2"))),
    ],
)
def test_a_changed_document_leaves_the_other_alone(ranks: Ranks, model: str, name: str) -> None:
    where = layout(name)
    first, second = ranks(where.world, bodies.perturbed_first_document, case(model, where))[-1]
    assert torch.equal(first[1], second[1])  # the second document does not notice
    assert not torch.equal(first[0], second[0])


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, name", [("gpt", "TP2xDP2"), ("llama", "TP4"), pytest.param("gpt", "1", marks=SLOW)])
def test_padding_rows_stay_zero(ranks: Ranks, model: str, name: str) -> None:
    where = layout(name, make_vocab_size_divisible_by=128)  # 131 -> 256, under TP4 512: two ranks have padding only
    for rank, (weights, grads, rows) in enumerate(ranks(where.world, bodies.padding_rows, case(model, where))):
        assert weights == 0 and grads == 0, f"rank {rank}"
        assert rows > 0 or name == "TP4"
    agrees(ranks, case(model, where))


@pytest.mark.parametrize("name", ["TP4+SP", pytest.param("TP4", marks=SLOW)])
def test_more_ranks_than_key_value_heads(ranks: Ranks, name: str) -> None:
    agrees(ranks, case("llama", layout(name)))
    one_head = replace(MODELS["llama"], num_key_value_heads=1)
    agrees(ranks, replace(case("llama", layout(name)), model=one_head))


def test_more_ranks_than_heads_cannot_be_built(ranks: Ranks) -> None:
    two_heads = replace(MODELS["gpt"], num_attention_heads=2)
    with pytest.raises(RuntimeError, match="2 units over 4 ranks would be held 2 times"):
        ranks(4, measure, replace(case("gpt", layout("TP4")), model=two_heads))


@pytest.mark.parametrize("counts", [(3, 2), (0, 5), (5, 0), (1, 0, 4, 0), (0, 2, 0, 3)])
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=SLOW)])
def test_uneven_and_empty_stages(ranks: Ranks, counts: tuple[int, ...], model: str) -> None:
    name = "PP2" if len(counts) == 2 else "PP4"
    agrees(ranks, case(model, layout(name, layers_per_stage=counts)))


def test_chunks_without_a_pipeline_are_refused(ranks: Ranks) -> None:
    with pytest.raises(Refused, match="--vpp 2 --pp 1"):
        ranks(1, measure, case("gpt", layout("1", vpp=2)))


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted(MODELS))
def test_initial_weights_are_bitwise_equal(ranks: Ranks, model: str) -> None:
    wanted = reference_of(case(model, layout("1"), steps=1, dtype="float32"))
    for name in ("TP2", "TP4", "PP2x2chunks", "TP2xPP2xDP2"):
        asked = case(model, layout(name), steps=0, dtype="float32")
        found: Measured = ranks(asked.layout.world, measure, asked)[0]
        assert found.initial.keys() == wanted.initial.keys()
        assert all(torch.equal(found.initial[n], wanted.initial[n]) for n in wanted.initial)


@pytest.mark.parametrize(
    "name, zero",
    [("DP2", 0), ("DP4", 1), ("PP2xDP2", 1), *(pytest.param(n, 1, marks=SLOW) for n in ("DP2", "TP2xDP2"))],
)
def test_overlap_changes_no_bit(ranks: Ranks, name: str, zero: int) -> None:
    results = []
    for overlap in (True, False):
        where = layout(name, zero=zero, overlap_grad_reduce=overlap, overlap_param_gather=overlap, ddp_bucket_size=1500)
        asked = case("gpt", where, dtype="float32")
        results.append(ranks(where.world, measure, asked)[0])
    on, off = results
    assert on.losses == off.losses and on.norms == off.norms
    assert all(torch.equal(on.weights[n], off.weights[n]) for n in on.weights)


@pytest.mark.parametrize(
    "model, dtype", [("llama-tied", "float32"), ("llama", "bfloat16"), pytest.param("gpt", "float32", marks=SLOW)]
)
def test_copies_stay_bitwise_equal(ranks: Ranks, model: str, dtype: str) -> None:
    where = Layout(**SP_PP_DP, make_vocab_size_divisible_by=2)
    found: Measured = ranks(8, measure, case(model, where, dtype=dtype, steps=2))[0]
    assert found.differing == []


@pytest.mark.parametrize("model", ["gpt", "llama-tied"])
def test_both_owners_of_a_tie_step_the_same_rows(ranks: Ranks, model: str) -> None:
    """A fused update may round the last few elements of a run in another way, so equal copies need equal runs."""
    by_place: dict[tuple[int, int], list[Any]] = {}
    for where, runs in ranks(8, bodies.tied_runs, case(model, Layout(**SP_PP_DP, make_vocab_size_divisible_by=2))):
        by_place.setdefault((where["tp"], where["dp"]), []).append(runs)
    assert len(by_place) == 4
    assert all(first == last and first for first, last in by_place.values())


def test_recompute_changes_no_bit_with_dropout(ranks: Ranks) -> None:
    plain, *others = (
        ranks(2, measure, case("gpt", layout("TP2+SP", recompute=how), dtype="float32"))[0]
        for how in ("none", "selective", "full")
    )
    for other in others:
        assert plain.losses == other.losses
        assert all(torch.equal(plain.gradients[n], other.gradients[n]) for n in plain.gradients)


# ---- narrower types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, name",
    [("gpt", "TP2+SP"), ("llama-tied", "DP2"), ("llama", "TP2xPP2"), pytest.param("llama", "PP2", marks=SLOW)],
)
def test_float32(ranks: Ranks, model: str, name: str) -> None:
    asked = case(model, layout(name), dtype="float32", steps=5)
    found, alone = ranks(asked.layout.world, measure, asked)[0], reference_of(asked)
    for step, (a, b) in enumerate(zip(found.losses, alone.losses, strict=True)):
        assert a == pytest.approx(b, rel=1e-6 if step == 0 else 1e-4)
    assert found.norms[0] == pytest.approx(alone.norms[0], rel=1e-5)
    assert found.differing == []


def test_bfloat16_sums_over_ranks_do_not_drift(ranks: Ranks) -> None:
    norms = [ranks(4, measure, case("llama", layout(n), dtype="bfloat16"))[0].norms for n in ("TP4", "TP4+SP")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


# ---- the check notices what is broken --------------------------------------------------------------------------------


def broken(ranks: Ranks, model: str, where: Layout, inject: str) -> list[str]:
    asked = case(model, where, inject=inject, steps=2)
    return faults(ranks(where.world, measure, asked)[0], reference_of(asked))


@pytest.mark.parametrize(
    "model, name, named",
    [
        ("gpt", "TP2+SP", "layers.0.attention_norm.weight"),  # gains that see a part of the sequence
        ("llama", "TP4", "layers.0.attention.qkv.weight"),  # key/value heads that see a part of the queries
        ("gpt", "PP2", "embed.weight"),  # a tie over stages
        ("llama", "DP2", "layers.4.mlp.down.weight"),  # the first bucket
        ("llama", "TP2", "layers.0.attention_norm.weight"),  # the input gradient of a split layer
    ],
)
def test_a_dropped_sum_is_noticed(ranks: Ranks, model: str, name: str, named: str) -> None:
    where = layout(name, sequence_parallel=name == "TP2+SP")
    bad = broken(ranks, model, where, "drop-allreduce")
    assert any(line.startswith(f"gradient {named}: ") for line in bad), bad[:8]


def test_only_what_was_dropped_is_named(ranks: Ranks) -> None:
    bad = broken(ranks, "gpt", layout("TP2+SP"), "drop-allreduce")
    named = {line.split()[1].rstrip(":") for line in bad if line.startswith("gradient layers")}
    assert named and all("norm" in name or name.endswith(("out.bias", "down.bias")) for name in named)


def test_a_doubled_bias_is_noticed(ranks: Ranks) -> None:
    for name in ("TP2", "TP2+SP"):
        assert any(line.startswith("loss: ") for line in broken(ranks, "gpt", layout(name), "double-bias"))


@pytest.mark.parametrize(
    "model, name, inject, words",
    [
        ("llama", "PP2", "drop-allreduce", "sums no gradients over ranks"),
        ("llama", "TP2", "double-bias", "has a bias beside a sum"),
        ("gpt", "PP2", "double-bias", "has a bias beside a sum"),
        ("gpt", "TP2", "drop-everything", "the mistakes are drop-allreduce, double-bias"),
    ],
)
def test_a_mistake_that_cannot_be_made_is_refused(ranks: Ranks, model: str, name: str, inject: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        broken(ranks, model, layout(name), inject)
