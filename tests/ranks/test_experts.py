"""Experts dealt to ranks: where they are stored, who sends how much, generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.moe_matrix import MODELS, mixtral
from tests.ranks.expert_bodies import generated, moved_bytes, order_of_work, saved_as_numbers, wrong_numbers

PLAIN = replace(mixtral(), num_layers=2)
FOLDS = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}


def test_every_expert_comes_through_a_layout_and_back(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    step = ranks(4, saved_as_numbers, PLAIN, FOLDS, tmp_path, timeout=120)[0]
    wrong, seen = wrong_numbers(PLAIN, {}, step)
    whole = PLAIN.num_layers * PLAIN.num_experts * 3 * PLAIN.expert_width * PLAIN.hidden_size
    assert (wrong, seen) == ([], whole)
    others = ranks(4, wrong_numbers, PLAIN, {"dp": 4, "ep": 2, "etp": 2, "zero": 3}, step, timeout=120)
    assert [wrong for wrong, _ in others] == [[]] * 4 and sum(seen for _, seen in others) == whole
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in theirs.items():
        if ".experts." in name:
            block, expert, matrix = int(name.split(".")[2]), int(name.split(".")[-3]), name.split(".")[-2]
            number = 1.0 + 100 * block + expert + 0.25 * (matrix == "w3")
            assert bool((tensor == (-number if matrix == "w2" else number)).all()), name
    assert sum(".experts." in name for name in theirs) == PLAIN.num_layers * PLAIN.num_experts * 3


def test_generation_with_experts_on_other_ranks(ranks: Callable[..., list[Any]]) -> None:
    prompts = [[5, 17, 99, 3, 42], [7], [60, 61, 62]]
    config = replace(MODELS["mla"], max_position_embeddings=32)
    alone = generated(config, {}, prompts)
    assert all(found == alone for found in ranks(2, generated, config, {"tp": 2, "ep": 2, "etp": 1}, prompts))


def test_each_token_is_sent_once_per_visit(ranks: Callable[..., list[Any]]) -> None:
    """Tensor-parallel ranks that hold the same tokens send a share each: together K rows per token, there and back,
    forward and backward."""
    visits = 16 * PLAIN.moe_router_topk * PLAIN.hidden_size * PLAIN.num_layers
    for layout in ({"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}):
        found = ranks(2, moved_bytes, PLAIN, layout, timeout=120)
        assert all(len(calls) == 4 * PLAIN.num_layers for calls in found)
        assert sum(n for calls in found for _, n in calls) == 4 * visits


def under_way(events: list[str]) -> list[int]:
    """How many transfers are, whenever experts compute."""
    sums = accumulate(event.endswith("+") - event.endswith("-") for event in events)
    return [n for n, event in zip(sums, events, strict=True) if event == "experts"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_half_travels_while_the_other_is_computed(ranks: Callable[..., list[Any]], recompute: str) -> None:
    """The order of the work says so, in the forward and in the backward."""
    config = replace(mixtral(moe_shared_expert_intermediate_size=16), num_layers=1)
    layout = {"tp": 2, "ep": 2, "etp": 1, "recompute": recompute}
    whole, halves = (
        ranks(2, order_of_work, config, {**layout, "overlap_moe_expert_parallel_comm": on}, timeout=120)
        for on in (False, True)
    )
    assert whole[0] == whole[1] and halves[0] == halves[1]
    assert set(under_way(whole[0])) == {0} if recompute == "none" else {0, 1}
    assert min(under_way(halves[0])) > 0
    forward = "0+ 1+ shared 0- experts 2+ 1- experts 3+ shared 2- 3-"
    backward = "4+ 5+ shared 4- experts 6+ 5- experts 7+ shared 6- 7-"
    if recompute == "full":  # what nothing reads is not sent back a second time
        backward = "4+ 5+ shared 6+ 7+ shared 6- experts 7- experts shared 4- experts 8+ 5- experts 9+ shared 8- 9-"
    assert " ".join(halves[0]) == f"{forward} {backward}"
