"""Steps that are suspect: what is seen, what a second run says, and what the policies do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from isotron.config.fault_words import KINDS, Fault
from isotron.core.errors import Refused
from isotron.core.precision.scaler import LossScaler
from isotron.train import injector as injecting
from isotron.train.config import FaultConfig
from isotron.train.faults import Deadline, StopSignal
from isotron.train.injector import Injector
from isotron.train.judge import FEWEST, HISTORY, Judge, Rewind, Verdict
from isotron.train.step import StepResult
from isotron.train.stragglers import Stragglers

NAN, USUAL = math.nan, [2.0] * FEWEST


def taking(judge: Judge, *outcomes: tuple[float, float]) -> Any:
    """Steps with these losses and norms, one for every call."""
    left: Iterator[tuple[float, float]] = iter(outcomes)

    def take() -> StepResult:
        loss, norm = next(left)
        applied = judge.admits(loss, norm)
        return StepResult(loss, norm, 0.1, 8, not applied)

    return take


@pytest.mark.parametrize(
    ("leaves", "outcomes", "verdict", "applied"),
    [
        ({}, [(2.0, 1.0)], None, True),
        ({}, [(NAN, 1.0)], Verdict("the loss is nan"), False),
        ({}, [(2.0, math.inf)], Verdict("the gradient norm is inf"), False),
        ({}, [(99.0, 1.0)], None, True),  # spikes are not looked for unless asked
        ({"spike_factor": 3.0}, [(5.9, 1.0)], None, True),
        ({"spike_factor": 3.0}, [(6.1, 1.0)], Verdict("the loss is 6.1, 3.05 times the mean of the last 8"), False),
        ({"rerun": True}, [(NAN, 1.0), (2.0, 1.0)], Verdict("the loss is nan", "transient"), True),
        ({"rerun": True}, [(NAN, NAN), (NAN, NAN)], Verdict("the loss is nan", "persistent"), False),
        ({"rerun": True, "spike_factor": 2.0}, [(8.0, 1.0), (9.0, 1.0)],
         Verdict("the loss is 8, 4 times the mean of the last 8", "transient"), False),
    ],
)  # fmt: skip
def test_what_is_suspect(leaves: Any, outcomes: Any, verdict: Verdict | None, applied: bool) -> None:
    judge = Judge(FaultConfig(**leaves), list(USUAL))
    result, found = judge.step(taking(judge, *outcomes), 7)
    assert found == verdict and result.skipped is not applied
    assert judge.recent == [*USUAL, result.loss] if applied else judge.recent == USUAL


def test_an_overflow_that_searches_its_scale_is_no_fault() -> None:
    judge = Judge(FaultConfig(on_nan="stop"), [], scaler=LossScaler(2.0))
    assert judge.step(taking(judge, (2.0, math.inf)), 1) == (StepResult(2.0, math.inf, 0.1, 8, True), None)
    with pytest.raises(Refused):
        judge.step(taking(judge, (NAN, math.inf)), 2)


SPIKE = (9.0, 1.0)


@pytest.mark.parametrize(
    ("outcomes", "clean", "scale"),
    [
        ([(2.0, 1.0)], 3, 64.0),
        ([(2.0, math.inf)], 0, 32.0),
        ([(NAN, NAN), (NAN, NAN)], 0, 32.0),
        ([(NAN, 1.0), (2.0, 1.0)], 3, 64.0),
        ([SPIKE, (2.0, 1.0)], 3, 64.0),
        ([SPIKE, SPIKE], 2, 64.0),
        ([SPIKE, (2.0, math.inf)], 0, 32.0),
    ],
)
def test_the_loss_scale_hears_of_a_step_once(outcomes: Any, clean: int, scale: float) -> None:
    """Also of one that is taken again, which has the scale of the first time; a refused spike is no clean step."""
    scaler = LossScaler(64.0, window=4, hysteresis=1, clean=2)
    judge, seen = Judge(FaultConfig(rerun=True, spike_factor=2.0), list(USUAL), scaler=scaler), list[float]()
    take = taking(judge, *outcomes)

    def under_a_scale() -> StepResult:
        seen.append(scaler.scale)
        return take()

    judge.step(under_a_scale, 1)
    assert (scaler.clean, scaler.scale) == (clean, scale) and seen == [64.0] * len(outcomes)


def test_few_losses_are_no_measure_and_old_ones_go() -> None:
    judge = Judge(FaultConfig(spike_factor=2.0), [1.0] * (FEWEST - 1))
    assert judge.step(taking(judge, (50.0, 1.0)), 1)[1] is None
    for step in range(HISTORY + 5):
        judge.step(taking(judge, (1.0, 1.0)), step)
    assert judge.recent == [1.0] * HISTORY


def test_weights_are_waited_for_only_when_they_will_change() -> None:
    waits: list[int] = []
    judge = Judge(FaultConfig(), [], lambda: waits.append(1))
    judge.step(taking(judge, (NAN, 1.0)), 1)
    assert not waits
    judge.step(taking(judge, (1.0, 1.0)), 2)
    assert waits == [1]


@pytest.mark.parametrize(("leaf", "outcome"), [("on_nan", (NAN, 1.0)), ("on_spike", (9.0, 1.0))])
def test_policies(leaf: str, outcome: tuple[float, float]) -> None:
    judge = Judge(FaultConfig(spike_factor=2.0, **{leaf: "stop"}), list(USUAL))
    with pytest.raises(Refused) as caught:
        judge.step(taking(judge, outcome), 12)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 1 and problem.asked == "training on after step 11"
    assert problem.case.startswith("step 12 was not applied: the loss is") and "--on-spike skip" in problem.fix
    judge = Judge(FaultConfig(spike_factor=2.0, **{leaf: "rewind"}), list(USUAL))
    with pytest.raises(Rewind, match="step 12: the loss is"):
        judge.step(taking(judge, outcome), 12)


# ---- time, faults on purpose, slow ranks ---------------------------------------------------------------------------


def test_time_that_is_up_is_a_stop() -> None:
    with StopSignal() as stop:
        Deadline(0.0).look(stop)
        Deadline(5.0).look(stop)
        assert not stop.signum
        Deadline(1e-9).look(stop)
        assert stop.name == "exit-duration-in-mins"


def test_a_fault_happens_once_per_run_and_on_its_rank(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("isotron.train.injector.time.sleep", slept.append)
    words = ["slow@3:1", "slow@3:0", "hang@4:1"]
    for _ in range(2):
        injector = Injector(words, 1, tmp_path)
        for step in (1, 2, 3, 3):
            injector.before_step(step)
    assert slept == [1.0] and [p.name for p in (tmp_path / "injected").iterdir()] == ["slow@3:1"]
    assert str(Fault.parse("kill-save@12:3")) == "kill-save@12:3"
    for word in ("burn@1:0", "kill@0:0", "kill@1"):
        with pytest.raises(ValueError, match="KIND@STEP:RANK"):
            Fault.parse(word)
    told = [line.split("|")[1].strip() for line in (injecting.__doc__ or "").splitlines() if line.startswith("|")]
    assert told[2:] == list(KINDS)


class TwoBusy:
    """A group whose other rank worked three times as long."""


def test_the_slowest_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from isotron.core import comm

    monkeypatch.setattr(comm, "gather_json", lambda own, group: [own, 3 * own, own])
    slow = Stragglers()
    slow.begin()
    comm.WAITED.seconds += 0.5
    slow.end(1.5)
    found = slow.report(TwoBusy())  # type: ignore[arg-type]
    assert found == {"busy_s": [1.0, 3.0, 1.0], "slowest": 1, "ratio": 3.0, "straggler": True}
    assert slow.steps == 0 and slow.seconds == 0.0
