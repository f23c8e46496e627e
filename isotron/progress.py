"""How far a long job is: a bar on a terminal, a plain line every ten seconds elsewhere. PURE."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Protocol

Log = Callable[[str], None]
Tick = Callable[[], None]
SECONDS = 10.0


class Report(Protocol):
    """Says how much of the total is done, and what has come of it: `report(4096, documents=3, tokens=40)`."""

    def __call__(self, done: int, **facts: int) -> None: ...


@contextmanager
def progress(what: str, total: int, log: Log) -> Iterator[Report]:
    """Yields what is called after each part of a job named `what`. With facts a line has the last one per second."""
    if sys.stderr.isatty():
        with _bar(what, total) as report:
            yield report
    else:
        yield _lines(what, total, log)


@contextmanager
def ticking(what: str, total: int) -> Iterator[Tick]:
    """Yields what is called when one of `total` parts is done; lines go to stderr."""
    done = count(1)
    with progress(what, total, lambda line: print(line, file=sys.stderr, flush=True)) as report:
        yield lambda: report(next(done))


def _lines(what: str, total: int, log: Log) -> Report:
    started = last = time.monotonic()

    def report(done: int, **facts: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS:
            return
        last = now
        spent, share = now - started, max(done, 1) / max(total, 1)
        rate = f"  {[*facts.values()][-1] / spent:,.0f}/s" if facts else ""
        log(f"{what} {100 * share:5.1f}%{_worded(facts)}{rate}  {spent / share - spent:,.0f} s left")

    return report


@contextmanager
def _bar(what: str, total: int) -> Iterator[Report]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn(what),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[facts]}"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, facts="")
        yield lambda done, **facts: bar.update(task, completed=done, facts=_worded(facts).strip())


def _worded(facts: Mapping[str, int]) -> str:
    return "".join(f"  {number:,} {name}" for name, number in facts.items())
