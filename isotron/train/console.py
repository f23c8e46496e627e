"""What a person sees of a run: a line every few steps, and on a terminal a bar with the time left below the lines.

The lines keep the wording of Megatron-LM's, because scripts look for it. Their numbers are means over the steps since
the line before; skipped steps do not enter the loss.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any, TextIO

from isotron.train.record import StepRecord


class Console:
    """Prints to `stream` (stdout by default)."""

    def __init__(self, log_interval: int, stream: TextIO | None = None) -> None:
        self._interval = log_interval
        self._stream = stream or sys.stdout
        self._total = 0
        self._since: list[StepRecord] = []
        self._before = (0, 0)
        self._bar: Any = None
        self._shown: AbstractContextManager[Any] = nullcontext()

    def start(self, step: int, total: int, counts: tuple[int, int] = (0, 0)) -> None:
        """A run of `total` steps goes on after `step`, with so many skipped and NaN steps until then."""
        self._total, self._before = total, counts
        if self._stream.isatty():
            self._bar = _bar(self._stream)
            self._bar.add_task("", total=total or None, completed=step, loss="")
            self._shown = self._bar
            self._shown.__enter__()

    def close(self) -> None:
        """Takes the bar away."""
        self._shown.__exit__(None, None, None)
        self._shown, self._bar = nullcontext(), None

    def say(self, line: str) -> None:
        """Prints one line, above the bar where there is one."""
        if self._bar is None:
            tell(line, self._stream)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Takes in one step; prints when it is time, and after the last one."""
        self._since.append(record)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record.step, loss=f"loss {record.loss:.4f}")
        if (self._interval > 0 and record.step % self._interval == 0) or record.step == self._total:
            self.say(step_line(self._since, self._total, self._before))
            self._before = counted(self._since, self._before)
            self._since = []

    def task(self, step: int, name: str, values: Mapping[str, float | None]) -> None:
        """Prints what a task came to."""
        numbers = " | ".join(f"{key}: {value:.6E}" for key, value in values.items() if value is not None)
        self.say(f" {name} at iteration {step} | {numbers} | ")

    def evaluation(self, step: int, name: str, loss: float) -> None:
        """Prints the result of one evaluation."""
        where = "" if name == "valid" else f" on {name} set"
        numbers = f"lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}"
        self.say(f" validation loss at iteration {step}{where} | {numbers} | ")


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once, to stdout by default; the run goes on when its reader (head) has gone."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:  # a run is worth more than its lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float."""
    return math.inf if loss > 709 else math.exp(loss)


def counted(records: list[StepRecord], before: tuple[int, int]) -> tuple[int, int]:
    """Steps that were skipped, and steps whose loss was not finite: `before`, and those among the records."""
    nan = sum(not math.isfinite(r.loss) for r in records)
    return before[0] + sum(r.skipped for r in records), before[1] + nan


def step_line(records: list[StepRecord], total: int, before: tuple[int, int] = (0, 0)) -> str:
    """The line for some successive steps; `before`: skipped and NaN steps of the run until then."""
    last, (skipped, nan) = records[-1], counted(records, before)
    seconds = sum(r.step_time_s for r in records) / len(records)
    trained = [r.loss for r in records if not r.skipped] or [last.loss]
    tflops = sum(r.tflops_per_device * r.step_time_s for r in records) / sum(r.step_time_s for r in records)
    fields = (
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last.step:8d}/{total:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * seconds:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.{1 if tflops >= 10 else 4}f}",
        f"tokens per second: {sum(r.tokens for r in records) / sum(r.step_time_s for r in records):.1f}",
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"lm loss: {sum(trained) / len(trained):.6E}",
        *([] if last.loss_scale is None else [f"loss scale: {last.loss_scale:.1f}"]),
        f"grad norm: {last.grad_norm:.3f}",
        f"number of skipped iterations: {skipped:3d}",
        f"number of nan iterations: {nan:3d}",
    )
    return f" {' | '.join(fields)} |"


def _bar(stream: TextIO) -> Any:
    from rich import progress
    from rich.console import Console as RichConsole

    columns = (
        progress.TextColumn("train"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[loss]}"),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=RichConsole(file=stream), transient=True)
