"""Learning rate and weight decay at points that can be worked out by hand."""

import math
from dataclasses import replace

import pytest

from isotron.core.optim.schedules import ScheduleConfig, learning_rate, weight_decay

BASE = ScheduleConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=10, lr_decay_iters=110, lr_wsd_decay_iters=50)
HALF = 0.1 + 0.9 * 0.5


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_warm_up_ends_at_the_highest_rate(style: str) -> None:
    cfg = replace(BASE, lr_decay_style=style)
    assert learning_rate(cfg, 1) == pytest.approx(0.1)
    assert learning_rate(cfg, 5) == pytest.approx(0.5)
    assert learning_rate(cfg, 10) == 1.0
    assert learning_rate(replace(cfg, lr_warmup_init=0.5), 5) == pytest.approx(0.75)
    assert learning_rate(cfg, 111) == (1.0 if style == "constant" else 0.1)


@pytest.mark.parametrize(
    "style, step, value",
    [
        ("constant", 60, 1.0),
        ("linear", 60, HALF),
        ("linear", 110, 0.1),
        ("cosine", 60, HALF),
        ("cosine", 35, 0.1 + 0.9 * (0.5 + 0.5 * math.sqrt(0.5))),
        ("cosine", 110, 0.1),
        ("inverse-square-root", 40, 0.5),
        ("inverse-square-root", 90, 1 / 3),
        ("WSD", 60, 1.0),
        ("WSD", 110, 0.1),
        ("WSD", 85, 0.1 + 0.9 * (2 * 0.5**0.5 - 1)),
    ],
)
def test_decay(style: str, step: int, value: float) -> None:
    assert learning_rate(replace(BASE, lr_decay_style=style), step) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    "style, left",
    [("exponential", 2 * 0.5**0.5 - 1), ("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - math.sqrt(0.5))],
)
def test_the_end_of_wsd(style: str, left: float) -> None:
    cfg = replace(BASE, lr_decay_style="WSD", lr_wsd_decay_style=style)
    assert learning_rate(cfg, 85) == pytest.approx(0.1 + 0.9 * left)
    assert learning_rate(cfg, 110) == pytest.approx(0.1)


def test_no_warm_up_and_a_fraction() -> None:
    assert learning_rate(replace(BASE, lr_warmup_iters=0, lr_decay_style="linear"), 55) == pytest.approx(HALF)
    cfg = replace(BASE, lr_warmup_iters=0, lr_warmup_fraction=0.1)
    assert learning_rate(cfg, 11) == 1.0 and learning_rate(cfg, 10) == pytest.approx(10 / 11)
    low = replace(BASE, lr_warmup_iters=0, min_lr=0.2, lr_decay_style="inverse-square-root")
    assert learning_rate(low, 100) == 0.2  # 1/10 would be lower


@pytest.mark.parametrize("style, quarter", [("linear", 0.1 + 0.2 * 0.25), ("cosine", 0.1 + 0.1 * (1 - math.sqrt(0.5)))])
def test_weight_decay_ramps(style: str, quarter: float) -> None:
    cfg = ScheduleConfig(
        start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style=style, lr_decay_iters=100
    )
    assert weight_decay(cfg, 25) == pytest.approx(quarter)
    assert weight_decay(cfg, 50) == pytest.approx(0.2)
    assert weight_decay(cfg, 100) == weight_decay(cfg, 200) == pytest.approx(0.3)


def test_constant_weight_decay() -> None:
    assert weight_decay(ScheduleConfig(weight_decay=0.01), 5) == 0.01


def test_the_first_step_is_megatrons() -> None:
    """The N-th step uses the rate after N - 1 updates: the start of warm-up, or the full rate without one."""
    assert learning_rate(replace(BASE, lr_warmup_init=0.25), 0) == 0.25
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        cfg = replace(BASE, lr_warmup_iters=0, lr_decay_style=style, lr_wsd_decay_iters=10)
        assert learning_rate(cfg, 0) == BASE.lr
