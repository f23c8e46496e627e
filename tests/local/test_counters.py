"""The counters of a checkpoint: what no run can have saved is refused, by name and before any data is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotron.core.errors import Refused
from isotron.core.precision.scaler import LossScaler
from isotron.train.state import _load_counters

GOOD: dict[str, Any] = {
    "updates": 2, "consumed_samples": 8, "skipped": 0, "segments": [4, 4], "scaler": LossScaler(2.0).state(),
}  # fmt: skip


def state() -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(updates=0), scaler=LossScaler(1.0))


def test_counters_are_taken_in() -> None:
    run = state()
    _load_counters(run, GOOD, Path("run/step_00000002"))
    assert (run.optimizer.updates, run.consumed_samples, run.skipped, run.segments) == (2, 8, 0, [4, 4])
    assert run.scaler == LossScaler(2.0)
    run.scaler = LossScaler(1.0, 4.0, 50, 1)
    _load_counters(run, GOOD, Path("run/step_00000002"))
    assert run.scaler == LossScaler(4.0, 4.0, 50, 1)  # options are those of this run


@pytest.mark.parametrize(
    "wrong",
    [
        {"updates": "x"}, {"updates": -1}, {"updates": None}, {"consumed_samples": -4}, {"consumed_samples": 9},
        {"skipped": -1}, {"segments": [-5, 20]}, {"segments": "abc"}, {"segments": 3}, {"segments": []},
        {"scaler": {"dynamic": True}}, {"scaler": 5}, {"scaler": {"scale": 1.0, "more": 2}}, {"scaler": {"scale": "x"}},
        {"sources": [3]},
    ],
    ids=str,
)  # fmt: skip
def test_counters_that_no_run_has_are_refused(wrong: dict[str, Any]) -> None:
    run = state()
    with pytest.raises(Refused, match="run/step_00000002") as refused:
        _load_counters(run, GOOD | wrong, Path("run/step_00000002"))
    assert "counters" in str(refused.value) and run.optimizer.updates == 0


def test_what_the_run_has_read_is_taken_in_where_it_is_known() -> None:
    run = state()
    _load_counters(run, GOOD, Path("run/step_00000002"))
    assert run.sources == []
    _load_counters(run, GOOD | {"sources": [[3, 90]]}, Path("run/step_00000002"))
    assert run.sources == [[3, 90]]


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_counter_is_named(name: str) -> None:
    with pytest.raises(Refused, match=name):
        _load_counters(state(), {k: v for k, v in GOOD.items() if k != name}, Path("run/step_00000002"))
