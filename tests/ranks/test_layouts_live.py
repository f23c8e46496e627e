"""What several ranks do beside training in float64: overflow, evaluation, dropout masks, bounded sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.matrix import LAYOUTS, MODELS
from tests.ranks import bodies

Ranks = Callable[..., list[Any]]


def case(model: str, name: str, **changes: Any) -> Case:
    where = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, **LAYOUTS[name]})
    return Case(MODELS[model], where, **{"sequence": 16, **changes})


@pytest.mark.parametrize("name", ["TP2", "PP2", "DP2", "PP2xDP2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, name: str) -> None:
    asked = case("llama", name, dtype="float16", steps=6)
    for broken in (0, asked.layout.world - 1):
        for seen in ranks(asked.layout.world, bodies.overflow, asked, broken):
            assert [skipped for skipped, _, _ in seen] == [False, True, True, False, False, False]
            # the first overflow uses up hysteresis, the second halves; two clean steps double
            assert [scale for _, scale, _ in seen] == [256, 256, 128, 128, 256, 256]
            assert [moved for _, _, moved in seen] == [True, False, False, True, True, True]


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_evaluation_is_the_same_in_every_layout(ranks: Ranks, model: str) -> None:
    want = bodies.evaluated(case(model, "1"))
    for name in ("TP2+SP", "PP2", "PP2x2chunks", "DP2", "TP2xPP2"):
        asked = case(model, name)
        for found in ranks(asked.layout.world, bodies.evaluated, asked):
            assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", ["DP2", "PP2xDP2"])
def test_evaluation_between_steps_sees_current_weights(ranks: Ranks, name: str) -> None:
    """With overlap, weights are still under way when the evaluation begins."""
    runs = []
    for overlap in (True, False):
        asked = case("gpt", name, dtype="float32", steps=4)
        where = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
        asked = bodies.with_layout(asked, **where)
        runs.append(ranks(asked.layout.world, bodies.trained_and_evaluated, asked))
    assert runs[0] == runs[1]


def test_dropout_masks_are_slices_of_the_same_whole(ranks: Ranks) -> None:
    """Under sequence parallelism and split heads each rank has its own part of one mask, never another's."""
    whole = {name: mask for name, *_, mask in bodies.dropout_masks(case("gpt", "1"))}
    assert len(whole) == 1 + 3 * 5
    for name in ("TP2", "TP2+SP", "TP4+SP", "PP2"):
        asked = case("gpt", name)
        seen: dict[str, list[torch.Tensor]] = {}
        for rank in ranks(asked.layout.world, bodies.dropout_masks, asked):
            for layer, _, (part, parts), (head, heads), mask in rank:
                at = (
                    whole[layer].chunk(heads, 1)[head] if layer.endswith("core") else whole[layer].chunk(parts, 1)[part]
                )
                assert torch.equal(mask, at), f"{name} {layer}"
                seen.setdefault(layer, []).append(mask)
        assert seen.keys() == whole.keys()
        for layer, masks in seen.items():
            split = layer.endswith("core") or "SP" in name
            if len(masks) > 1:
                assert torch.equal(masks[0], masks[1]) == (not split), f"{name} {layer}"


def test_layers_and_samples_have_their_own_masks() -> None:
    masks = [mask for *_, mask in bodies.dropout_masks(case("gpt", "1"))]
    of_hidden = [m for m in masks if m.ndim == 3]
    for i, a in enumerate(of_hidden):
        assert not torch.equal(a[0], a[1])
        assert all(not torch.equal(a, b) for b in of_hidden[:i])
        assert abs(a.float().mean() - 0.9) < 0.05


def test_sends_under_way_are_bounded(ranks: Ranks) -> None:
    for name in ("PP2", "PP4", "PP2x2chunks"):
        asked = case("llama", name, global_batch=24, dtype="float32")
        assert all(0 < most <= 8 for most in ranks(asked.layout.world, bodies.most_sends_under_way, asked))
