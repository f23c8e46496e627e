"""The loss scale's rule, step by step."""

from dataclasses import replace
from typing import Any

import pytest

from isotron.core.optim.config import OptimConfig
from isotron.core.precision.scaler import LossScaler


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; "." is clean, "x" overflows."""
    found = []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


def test_hysteresis_is_used_up_once_and_restored_by_growth_only() -> None:
    scaler = LossScaler(64.0, window=3, hysteresis=2)
    # the first overflow costs hysteresis, every later one halves, clean steps in between do not restore it
    assert scales(scaler, "x.x.x") == [64, 64, 32, 32, 16]
    # three clean steps in a row double and restore
    assert scales(scaler, "...") == [16, 16, 32]
    assert scales(scaler, "x..x") == [32, 32, 32, 16]


def test_an_overflow_starts_the_window_again() -> None:
    assert scales(LossScaler(8.0, window=3, hysteresis=5), "..x..." + "...") == [8, 8, 8, 8, 8, 16, 16, 16, 32]


def test_the_floor_holds() -> None:
    assert scales(LossScaler(4.0, floor=1.0, hysteresis=1), "xxxx") == [2, 1, 1, 1]


def test_a_restored_scaler_goes_on_as_if_nothing_had_been() -> None:
    for cut in range(8):
        steps = "xx.x..xx"
        straight, first = LossScaler(64.0, window=2), LossScaler(64.0, window=2)
        whole = scales(straight, steps)
        assert scales(first, steps[:cut]) + scales(LossScaler(**first.state()), steps[cut:]) == whole


def changed(**leaves: Any) -> LossScaler:
    return LossScaler.for_run("float16", replace(OptimConfig(initial_loss_scale=64.0), **leaves))


@pytest.mark.parametrize(
    ("leaves", "steps", "expected"),
    [
        ({}, ".x", [64, 32]),
        ({"loss_scale_window": 3}, "...", [128, 128, 128]),  # five steps have been clean already
        ({"min_loss_scale": 512.0, "initial_loss_scale": 512.0}, "xx", [512, 512]),
        ({"hysteresis": 1}, "x", [32]),
        ({"hysteresis": 4, "loss_scale_window": 6}, ".xxxx", [128, 128, 128, 128, 64]),
        ({"initial_loss_scale": 8.0}, ".", [64]),  # where the scale began is over
        ({"loss_scale": 8.0}, "xx", [8, 8]),
    ],
    ids=str,
)
def test_options_asked_for_now_count_after_a_resume(leaves: Any, steps: str, expected: list[float]) -> None:
    """Scale and counters are the saved run's: 64, one of two units of hysteresis used up, then 5 clean steps."""
    saved, resumed = changed(), changed(**leaves)
    assert scales(saved, "x.....") == [64] * 6
    resumed.go_on_from(LossScaler(**saved.state()))
    assert scales(resumed, steps) == expected


def test_which_runs_scale() -> None:
    cfg = OptimConfig(initial_loss_scale=128.0, min_loss_scale=2.0, loss_scale_window=7, hysteresis=3)
    assert LossScaler.for_run("float16", cfg) == LossScaler(128.0, 2.0, 7, 3)
    fixed = LossScaler.for_run("float16", OptimConfig(loss_scale=8.0))
    assert scales(fixed, "xx.") == [8, 8, 8]
    for dtype in ("bfloat16", "float32", "float64"):
        assert LossScaler.for_run(dtype, cfg).scale == 1.0
