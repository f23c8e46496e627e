"""examples/core_loop.py: a loop on isotron.core alone gives the same losses on one process and on two."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from isotron.core.parallel.plan import Layout

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "core_loop.py"
STEPS = 6


def losses(layout: Layout) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: list[float] = runpy.run_path(str(EXAMPLE))["train"](layout, STEPS, rank)
    return found


def test_it_learns_on_one_process() -> None:
    found = losses(Layout(dp=1))
    assert len(found) == STEPS and found[-1] < found[0] - 0.1


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}])
def test_two_processes_give_the_same_losses(ranks: Callable[..., list[Any]], axes: dict[str, Any]) -> None:
    found = ranks(2, losses, Layout(**{"dp": 1, **axes}))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(losses(Layout(dp=1)), rel=1e-5)


def test_it_needs_the_core_only_and_fits_on_a_screen_or_two() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    imports = re.findall(r"^(?:from|import) (isotron[.\w]*)", text, re.M)
    assert imports and all(name.startswith("isotron.core.") for name in imports)
    assert len(text.splitlines()) <= 70
