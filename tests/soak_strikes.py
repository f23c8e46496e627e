"""Signals from outside to a random rank at a random moment: while a run starts, trains, or writes a checkpoint."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from isotron import supervise

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
POLL_S = 0.005


class Striker:
    """Sends one signal to one rank of the run that begins after it. `struck`: when, in words; empty if it came late."""

    def __init__(self, name: str, run: Path, near: Path, dice: random.Random, pids: list[int]) -> None:
        self._signal, self._run, self._places = SIGNALS[name], run, (run, near)
        self.struck = ""
        self._when = dice.choice(("starting", "training", "training", "saving", "saving", "saving"))
        self._delay, self._choice = dice.uniform(0.0, 1.5), dice.random()
        self._over = threading.Event()
        self._starts = self._count()
        self._pids = pids

    def _count(self) -> int:
        file = self._run / "metrics.jsonl"
        return file.read_text(encoding="utf-8").count('"event": "start"') if file.exists() else 0

    def _wait(self, until: Any, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._over.is_set() and time.monotonic() < end:
            if until():
                return True
            time.sleep(POLL_S)
        return False

    def _saving(self) -> bool:
        return any(next(place.glob(pattern), None) for place in self._places for pattern in ("*.tmp", "*/*.tmp"))

    def _work(self) -> None:
        if self._when == "starting":
            self._wait(lambda: self._pids, 10)
        elif not self._wait(lambda: self._count() > self._starts, 60):
            return
        self._over.wait(self._delay)
        if self._when == "saving" and not self._wait(self._saving, 5):
            return
        if self._pids and not self._over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[int(self._choice * len(self._pids))], self._signal)
                self.struck = self._when

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While a run is started and goes on."""
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


@contextlib.contextmanager
def started(pids: list[int]) -> Iterator[None]:
    """The process ids of the ranks that `run_local` starts meanwhile; in the end none of them may be left."""
    start = supervise._start

    def noting(*args: Any) -> Any:
        rank = start(*args)
        pids.append(rank.process.pid)
        return rank

    with patch.object(supervise, "_start", noting):
        yield
    end = time.monotonic() + 5
    while left := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < end, f"processes {left} were left behind"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
