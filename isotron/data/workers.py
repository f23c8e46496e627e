"""Worker processes that encode batches in order, ignore signals meant for their parent, and never outlive it. PURE."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from isotron.core.errors import refuse
from isotron.data.encode import Encoded, Encoder
from isotron.data.records import RecordBatch

T = TypeVar("T")
AHEAD = 3  # batches on the way per worker


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_all(encoder: Encoder, batches: Iterable[RecordBatch], workers: int) -> Iterator[Encoded]:
    """The batches encoded, in order, a few at a time; in this process when `workers` is 1."""
    if workers == 1:
        yield from map(encoder, batches)
        return
    # spawn: a forked child would inherit threads and, under a training program, torch
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(encoder,))
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode, batch))
            if len(pending) >= AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise refuse(
            f"--workers {workers}",
            "a worker process died (out of memory, or killed; or the calling script starts work when it is imported)",
            f"--workers {max(1, workers // 2)}",
            exit_code=1,
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_HELD: list[Callable[[RecordBatch], Encoded]] = []  # the encoder of a worker process, given to it once


def start_worker(encoder: Callable[[RecordBatch], Encoded]) -> None:
    """What a worker does first: it lives for its parent alone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    live_for_parent()
    _HELD[:] = [encoder]


def live_for_parent() -> None:
    """Leave signals of the terminal or the scheduler to the parent, and end when it is gone, however it went."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_end_with, args=(parent.sentinel,), name="parent", daemon=True)
        watch.start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _encode(batch: RecordBatch) -> Encoded:
    return _HELD[0](batch)
