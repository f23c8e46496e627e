"""How far a long computation of a command is: a bar on a terminal, a line every ten seconds elsewhere, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isotron.data.progress import SECONDS

Tick = Callable[[], None]


@contextmanager
def progress(what: str, total: int) -> Iterator[Tick]:
    """Yields what is called when one of `total` parts is done."""
    if sys.stderr.isatty():
        with _bar(what, total) as tick:
            yield tick
    else:
        yield _lines(what, total)


def _lines(what: str, total: int) -> Tick:
    started = last = time.monotonic()
    done = 0

    def tick() -> None:
        nonlocal last, done
        now, done = time.monotonic(), done + 1
        if now - last < SECONDS:
            return
        last, spent = now, now - started
        print(
            f"{what} {100 * done / total:5.1f}%  {spent / done * total - spent:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    return tick


@contextmanager
def _bar(what: str, total: int) -> Iterator[Tick]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn(what),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
