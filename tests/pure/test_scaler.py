"""The loss scale's rule, step by step."""

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


def test_which_runs_scale() -> None:
    cfg = OptimConfig(initial_loss_scale=128.0, min_loss_scale=2.0, loss_scale_window=7, hysteresis=3)
    assert LossScaler.for_run("float16", cfg) == LossScaler(128.0, 2.0, 7, 3)
    fixed = LossScaler.for_run("float16", OptimConfig(loss_scale=8.0))
    assert scales(fixed, "xx.") == [8, 8, 8]
    for dtype in ("bfloat16", "float32", "float64"):
        assert LossScaler.for_run(dtype, cfg).scale == 1.0
