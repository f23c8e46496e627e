"""A residual stream in float32 beside bfloat16 weights, over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, measure
from tests.matrix import MODELS

LAYOUTS = ({"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2, "zero": 3, "recompute": "full"})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_it(ranks: Any, layout: dict[str, Any]) -> None:
    """Sums in other orders differ by a rounding of bfloat16 in branches only."""
    alone = Layout(make_vocab_size_divisible_by=8, fp32_residual_connection=True)
    case = Case(MODELS["llama"], alone, 16, 2, 4, steps=2, dtype="bfloat16")
    found = ranks(2, measure, replace(case, layout=replace(alone, **layout), micro_batch=4 // 2))
    wanted = measure(case)
    assert found[0].losses == pytest.approx(wanted.losses, rel=5e-3)
    assert found[0].norms == pytest.approx(wanted.norms, rel=2e-2)
