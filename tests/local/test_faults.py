"""Stopping on a signal, ending when stuck, and giving up on numbers that are none."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from isotron.core.errors import Refused
from isotron.core.mesh import ALONE
from isotron.exits import EXIT_FAILED, EXIT_SIGNALLED, EXIT_STUCK, STOP_SIGNALS
from isotron.train.faults import MAX_CONSECUTIVE_SKIPS, FiniteGuard, StopSignal, Watchdog

ROOT = Path(__file__).resolve().parents[2]


# ---- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_handlers_come_back(number):
    before = [signal.getsignal(n) for n in STOP_SIGNALS]
    with StopSignal() as stop:
        assert not stop.agreed(ALONE) and stop.name == ""
        os.kill(os.getpid(), number)
        assert stop.agreed(ALONE) and stop.agreed(ALONE)
        assert stop.name == signal.Signals(number).name
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == before


def test_a_second_interrupt_interrupts():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed(ALONE)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_stop_can_be_requested_and_used_twice_in_a_process():
    for _ in range(2):
        with StopSignal() as stop:
            assert not stop.agreed(ALONE)
            stop.request()
            assert stop.agreed(ALONE) and stop.name == "SIGTERM"


def test_outside_the_main_thread_no_handler_is_set():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body() -> None:
        with StopSignal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


# ---- the watchdog --------------------------------------------------------------------------------------------------

STUCK = """
import time
from isotron.train.faults import Watchdog

def waiting_for_a_peer_that_is_gone():
    time.sleep(60)

with Watchdog(0.3, rank=3) as watchdog:
    watchdog.beat(17)
    waiting_for_a_peer_that_is_gone()
"""


def test_a_stuck_process_ends_and_says_where():
    done = subprocess.run(
        [sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_STUCK
    assert "rank 3 is stuck: no progress for 0.3 s, after step 17" in done.stderr
    assert "waiting_for_a_peer_that_is_gone" in done.stderr


class Expired:
    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()

    def within(self, seconds: float) -> bool:
        return self.event.wait(seconds)


def test_beats_keep_it_quiet_and_silence_does_not():
    expired = Expired()
    with Watchdog(0.4, on_stuck=expired) as watchdog:
        for step in range(8):
            watchdog.beat(step)
            assert not expired.within(0.1)
        assert expired.within(5)
        assert watchdog.last_step == 7


def test_a_long_phase_has_its_own_limit_and_its_name_is_told():
    expired = Expired()
    with Watchdog(0.3, rank=1, on_stuck=expired) as watchdog:
        with watchdog.phase("save", timeout_s=30):
            assert not expired.within(0.8)
            assert "(in: save)" in watchdog.message() and "30 s" in watchdog.message()
        assert "save" not in watchdog.message()
        with watchdog.phase("evaluation", timeout_s=0.5):
            assert expired.within(5)


def test_an_error_in_a_phase_ends_the_phase():
    watchdog = Watchdog(0.0)
    with pytest.raises(ValueError), watchdog.phase("save"):
        raise ValueError
    assert "save" not in watchdog.message()


def test_zero_means_no_watchdog():
    threads = threading.active_count()
    with Watchdog(0.0) as watchdog:
        watchdog.beat(1)
        assert threading.active_count() == threads


def test_the_thread_ends_with_the_context():
    threads = threading.active_count()
    with Watchdog(5.0):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads


class Clock:
    """A clock that shows `jump` seconds more from its third reading on, as after a process was stopped."""

    def __init__(self, jump: float) -> None:
        self.jump, self.readings = jump, 0

    def monotonic(self) -> float:
        self.readings += 1
        return time.monotonic() + (self.jump if self.readings > 2 else 0.0)


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    clock, expired = Clock(3600.0), Expired()
    monkeypatch.setattr("isotron.train.faults.time", clock)
    with Watchdog(2.0, on_stuck=expired):
        assert not expired.within(1.0)
        assert clock.readings > 3


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_skipped_and_nan_steps_are_counted():
    guard = FiniteGuard(skipped=2)
    guard.check(1.0, 1.0, False, 1)
    guard.check(1.0, math.inf, True, 2)
    guard.check(math.nan, math.nan, True, 3)
    assert (guard.skipped, guard.nan, guard.consecutive) == (4, 1, 2)
    guard.check(1.0, 1.0, False, 4)
    assert (guard.skipped, guard.nan, guard.consecutive) == (4, 1, 0)


@pytest.mark.parametrize(("loss", "cause"), [(math.nan, "the loss itself"), (2.0, "overflows in the backward")])
def test_too_many_skipped_steps_in_a_row_end_the_run(loss, cause):
    guard = FiniteGuard()
    for step in range(1, MAX_CONSECUTIVE_SKIPS):
        guard.check(loss, math.inf, True, step)
    with pytest.raises(Refused) as refused:
        guard.check(loss, math.inf, True, MAX_CONSECUTIVE_SKIPS)
    text = str(refused.value)
    assert f"after step {MAX_CONSECUTIVE_SKIPS}" in text and cause in text and "--lr" in text
    assert refused.value.exit_code == EXIT_FAILED


def test_the_search_for_a_loss_scale_does_not_count_and_a_nan_loss_does():
    guard = FiniteGuard(limit=3)
    for step in range(40):
        guard.check(2.0, math.inf, True, step, scale_can_fall=True)
    assert guard.skipped == 40 and guard.consecutive == 0
    with pytest.raises(Refused):
        for step in range(3):
            guard.check(math.nan, math.nan, True, step, scale_can_fall=True)


def test_exit_codes_differ():
    assert len({0, 1, 2, EXIT_STUCK, EXIT_SIGNALLED}) == 5 and EXIT_SIGNALLED == 128 + signal.SIGTERM


def test_a_run_that_ends_without_a_finite_loss_has_failed() -> None:
    guard = FiniteGuard()
    guard.check(2.0, 1.0, False, 1)
    guard.end()
    guard.check(float("nan"), 1.0, True, 2)
    with pytest.raises(Refused, match="the last 1 steps were skipped") as caught:
        guard.end()
    assert caught.value.exit_code == 1
