"""How far a long data job is: a bar on a terminal, a plain line every ten seconds elsewhere. PURE."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Log = Callable[[str], None]
Report = Callable[[int, int, int], None]
SECONDS = 10.0


@contextmanager
def progress(total: int, log: Log) -> Iterator[Report]:
    """Yields report(bytes read, documents, tokens); `total` is the number of bytes to read."""
    if sys.stderr.isatty():
        with _bar(total) as report:
            yield report
    else:
        yield _lines(total, log)


def _lines(total: int, log: Log) -> Report:
    started = last = time.monotonic()

    def report(position: int, documents: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS:
            return
        last = now
        spent, done = now - started, max(position, 1) / max(total, 1)
        written = f"{documents:,} documents  {tokens:,} tokens  {tokens / spent:,.0f}/s"
        log(f"{100 * done:5.1f}%  {written}  {spent / done - spent:,.0f} s left")

    return report


@contextmanager
def _bar(total: int) -> Iterator[Report]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("preprocess"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[documents]:,} documents  {task.fields[tokens]:,} tokens"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, documents=0, tokens=0)

        def report(position: int, documents: int, tokens: int) -> None:
            bar.update(task, completed=position, documents=documents, tokens=tokens)

        yield report
