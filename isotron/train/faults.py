"""When a run must not simply go on: it is told to stop, it is stuck, or its numbers are no numbers.

What all ranks must do together is decided from values that are equal on all of them. With which exit code it ends
then is said in `isotron/exits.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from isotron.core import comm
from isotron.core.errors import refuse
from isotron.core.mesh import Group
from isotron.exits import EXIT_FAILED, EXIT_STUCK, STOP_SIGNALS

MAX_CONSECUTIVE_SKIPS = 20
PHASE_FACTOR = 4.0
NEVER_SECONDS = 30 * 24 * 3600.0


class StopSignal:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a stop that all ranks make after the same step; a context manager.

    `device`: where the flag is reduced, as the group's back end needs it; CPU by default. A second SIGINT interrupts at
    once. Only the main thread may set handlers; elsewhere `request` is the only way to ask for a stop.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._before: dict[int, Any] = {}
        self._interrupted = False
        self.signum = 0

    @property
    def name(self) -> str:
        """Name of the signal that was seen, on every rank once `agreed` was true; empty before."""
        if self.signum == signal.SIGALRM:
            return "exit-duration-in-mins"
        return signal.Signals(self.signum).name if self.signum else ""

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._seen) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the signals back to whom they belonged."""
        for number, handler in self._before.items():
            # None stands for a handler that C code set and Python cannot set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a stop after this step, as the signal would."""
        self.signum = signum

    def _seen(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= signum == signal.SIGINT
        self.request(signum)

    def agreed(self, group: Group) -> bool:
        """Whether any rank of the group was told to stop; every rank of it must ask, and all get the same answer."""
        return self.agreed_with(False, group)[0]

    def agreed_with(self, other: bool, group: Group) -> tuple[bool, bool]:
        """`agreed`, and in the same exchange whether `other` is true on any rank."""
        flags = torch.tensor([self.signum, other], dtype=torch.int64, device=self._device)
        agreed, others = comm.all_reduce(flags, group, "max").tolist()
        if agreed:  # else keep what may have come during the exchange: the next step will tell the others
            self.signum = agreed
        return bool(agreed), bool(others)


class Deadline:
    """Asks for a stop once `minutes` have passed since it was made; 0: never. The ranks' clocks need not agree."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes if minutes else math.inf

    def look(self, stop: StopSignal) -> None:
        """After a step."""
        if time.monotonic() >= self._end and not stop.signum:
            stop.request(signal.SIGALRM)


class Watchdog:
    """Ends this process when no step is done for `timeout_s` seconds (0: never); a context manager.

    It prints rank, last step and phase, the stacks of all threads, and what `survey()` says of the other ranks, and
    leaves with EXIT_STUCK, so that whoever started the job can start it again. Time in which the whole process was
    stopped (Ctrl-Z) does not count.
    """

    def __init__(self, timeout_s: float, rank: int = 0, on_stuck: Callable[[], None] | None = None) -> None:
        self.timeout_s, self.rank, self.last_step = timeout_s, rank, 0
        self._phase, self._limit, self._beats = "", timeout_s, 0
        self._on_stuck = on_stuck or self._leave
        self.survey: Callable[[], str] = lambda: ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.timeout_s > 0:
            self._thread = threading.Thread(target=self._watch, name="isotron-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self, step: int) -> None:
        """Step `step` is done, or a part of a long phase: the time starts anew."""
        self.last_step = step
        self._beats += 1

    @contextlib.contextmanager
    def phase(self, name: str, timeout_s: float | None = None) -> Iterator[None]:
        """Something longer than a step (save, evaluation): it may take `timeout_s`, or PHASE_FACTOR x the usual."""
        before = self._phase, self._limit
        self._phase, self._limit = name, PHASE_FACTOR * self.timeout_s if timeout_s is None else timeout_s
        self._beats += 1
        try:
            yield
        finally:
            self._phase, self._limit = before
            self._beats += 1

    def message(self) -> str:
        """What is printed before the stacks."""
        where = f" (in: {self._phase})" if self._phase else ""
        stuck = f"no progress for {self._limit:g} s, after step {self.last_step}{where}"
        return (
            f"isotron: rank {self.rank} is stuck: {stuck}\nisotron: it ends with exit code {EXIT_STUCK}; its threads:\n"
        )

    def _watch(self) -> None:
        pause = min(1.0, self.timeout_s / 10)
        last, waited, beats = time.monotonic(), 0.0, self._beats
        while not self._closed.wait(pause):
            now = time.monotonic()
            # far more than a pause means that this process was stopped itself: others may be stuck, it is not
            waited = waited + min(now - last, 2 * pause) if beats == self._beats else 0.0
            last, beats = now, self._beats
            if waited > self._limit:
                self._on_stuck()
                return

    def _leave(self) -> None:
        os.write(2, self.message().encode())  # sys.stderr may belong to a progress bar or a lock that is held
        faulthandler.dump_traceback(file=2, all_threads=True)
        os.write(2, self.survey().encode())
        os._exit(EXIT_STUCK)


class FiniteGuard:
    """Counts steps without finite numbers and ends a run in which they do not stop.

    A step whose loss or gradient norm is NaN or infinite changes no weights. `skipped` goes on from what the checkpoint
    had, and so does `nan`, which counts the steps whose loss itself was not finite.
    """

    def __init__(self, skipped: int = 0, nan: int = 0, limit: int = MAX_CONSECUTIVE_SKIPS) -> None:
        self.skipped, self.nan, self.consecutive, self.limit = skipped, nan, 0, limit
        self.last = 0.0, 0.0, 0  # loss, norm and number of the last step

    def check(self, loss: float, norm: float, skipped: bool, step: int, scale_can_fall: bool = False) -> None:
        """Take in one step; refuses to go on after `limit` skipped steps in a row.

        `scale_can_fall`: a dynamic loss scale above its floor; a gradient overflow then is a search for the scale and
        does not count towards the limit. Loss and norm are equal on all ranks, so all ranks refuse together.
        """
        finite_loss = math.isfinite(loss)
        self.last = loss, norm, step
        self.nan += not finite_loss
        self.skipped += skipped
        if not skipped:
            self.consecutive = 0
        elif not (finite_loss and scale_can_fall):
            self.consecutive += 1
        if self.consecutive >= self.limit:
            raise self._refusal(loss, norm, step)

    def end(self) -> None:
        """The run is over: it failed when its last loss was not finite."""
        if not math.isfinite(self.last[0]):
            raise self._refusal(*self.last)

    def _refusal(self, loss: float, norm: float, step: int) -> Exception:
        if math.isfinite(loss):
            cause = "the loss is finite and its gradient is not: something overflows in the backward"
        else:
            cause = "the loss itself is not finite: the weights, or the data of these steps, are the cause"
        return refuse(
            f"training on after step {step}",
            f"the last {self.consecutive} steps were skipped (loss {loss:g}, gradient norm {norm:g}); {cause}",
            "resume from a checkpoint before it with a smaller --lr, a longer --lr-warmup-iters or --dtype float32",
            exit_code=EXIT_FAILED,
        )
