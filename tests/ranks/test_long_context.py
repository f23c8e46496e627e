"""A step over 131,072 tokens on two context-parallel ranks: two ways to communicate give the same loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isotron.core.models.mistral_config import MistralConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.ranks.bodies import build, steps_of

TOKENS = 131_072


def one_step(case: Case) -> tuple[float, float]:
    """Loss and gradient norm."""
    (result,) = steps_of(build(case), case)
    return result.loss, result.grad_norm


@pytest.mark.slow
def test_two_cores_agree(ranks: Callable[..., list[Any]]) -> None:
    model = MistralConfig(1, 8, 2, 2, 0, 16, 61, TOKENS, sliding_window=2048)
    layout = Layout(dp=1, cp=2, recompute="full", make_vocab_size_divisible_by=1)
    case = Case(model, layout, TOKENS, 1, 1, steps=1, dtype="float32")
    ring = ranks(2, one_step, case, timeout=280)[0]
    heads = ranks(2, one_step, replace(case, layout=replace(layout, cp_comm_type=("a2a",))), timeout=280)[0]
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(ring, heads, strict=True))
    assert math.isfinite(ring[0]) and ring[1] > 0
