"""`run_local`: the processes of one command on this machine, watched until all have ended.

Output goes straight to this process's own output. One failing rank ends all within seconds, and the message names the
rank that failed first, since what the others report is mostly its echo.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from multiprocessing.process import BaseProcess
from typing import Any

from isotron import processes
from isotron.core.errors import Refused, refuse, refuse_file
from isotron.exits import EXIT_SIGNALLED, STOP_SIGNALS

BYTES_PER_RANK = 50_000_000  # at the very least: what a started process has for itself alone
STORE_VARIABLE = "ISOTRON_STORE"
GRACE_SECONDS = 3.0  # how long the others may go on once one has failed
SAME_SECONDS = 0.2  # signals that come so close together are one: to this process, and to its whole group


@dataclass(frozen=True)
class Job:
    """What a child is to do, and where."""

    target: str
    args: tuple[Any, ...]
    environment: dict[str, str]
    path: list[str]
    directory: str
    threads: int


@dataclass(frozen=True)
class Report:
    """How a child's function ended: an exit code; where that is not 0, why, and when (seconds since the epoch)."""

    code: int
    refused: Refused | None = None
    failure: str = ""
    at: float = field(default_factory=time.time)


@dataclass
class Rank:
    """One child: its process, the pipe that its report comes through, and the report; `silent`: none can come (any
    more).
    """

    number: int
    process: BaseProcess
    pipe: connection.Connection
    report: Report | None = None
    silent: bool = False
    code: int | None = field(default=None)


@dataclass
class Told:
    """Stop signals that came to this process, and the ranks that were killed because they went on regardless; those
    among them that somebody had suspended.
    """

    seen: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    suspended: list[int] = field(default_factory=list)


def run_local(target: str, world: int, args: tuple[Any, ...] = ()) -> int:
    """Runs `target` ("module:function") with `args` on `world` processes of this machine; returns the exit code.

    An int that the function returns is its exit code, anything else is 0; 143 says that it stopped as it was told to,
    and is returned once all have ended. A world of 1 runs in place. SIGTERM, SIGINT and SIGUSR1 are passed on, a second
    SIGTERM or SIGINT kills. Raises `Refused` where that is what a rank raised; any other failure is printed with the
    rank's number: its exit code is returned, or 128 + the signal that ended it.
    """
    processes.check_platform()
    if world == 1:
        result = processes.find(target)(*args)
        return result if isinstance(result, int) else 0
    _check_room(world)
    directory = tempfile.mkdtemp(prefix="isotron-run-")
    ranks: list[Rank] = []
    try:
        with _forwarding(ranks) as told:
            for number in range(world):
                if not told.seen:
                    ranks.append(_start(number, world, target, args, directory))
            # ranks that were not there yet have not heard of it, and none has begun
            early = told.seen[0] if told.seen else 0
            first = None if early else _watch(ranks)
    finally:
        for rank in ranks:
            processes.kill(rank.process)
            rank.pipe.close()
        shutil.rmtree(directory, ignore_errors=True)
    if early:
        return _ended_by(early)
    if first is not None:
        return _told_to_stop(first, told, world) or _verdict(first, ranks)
    return EXIT_SIGNALLED if any(rank.code == EXIT_SIGNALLED for rank in ranks) else 0


def _check_room(world: int) -> None:
    """Refuse a number of processes that would take this machine down before any of them can say what is wrong."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = memory // BYTES_PER_RANK
    if world > most:
        case = f"this machine has {memory / 1e9:.0f} GB of memory, enough to start {most} at most"
        fix = "--tp, --pp and --dp with a smaller product, or torchrun or srun over more machines"
        raise refuse(f"{world} processes on this machine (tp x pp x dp)", case, fix)


def threads_per_process(world: int) -> int:
    """OMP_NUM_THREADS where the user set it, else an equal share of the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // world)


def _start(number: int, world: int, target: str, args: tuple[Any, ...], directory: str) -> Rank:
    environment = dict(os.environ)
    environment |= {"RANK": str(number), "WORLD_SIZE": str(world), STORE_VARIABLE: f"{directory}/store"}
    environment |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(world)}
    job = Job(target, args, environment, list(sys.path), os.getcwd(), threads_per_process(world))
    ours, theirs = Pipe()
    # the fork server may have been started with other outputs than this process has now
    outputs = [connection.Connection(os.dup(fd), readable=False) for fd in (1, 2)]
    sys.stdout.flush()
    process = processes.start(_child, (theirs, *outputs), f"isotron-rank-{number}", target)
    for handle in (theirs, *outputs):
        handle.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen as a dead process by _watch
        processes.send(ours, job)
    return Rank(number, process, ours)


@contextlib.contextmanager
def _forwarding(ranks: list[Rank]) -> Iterator[Told]:
    """Passes stop signals on to the children and gives what came of it; a second SIGTERM or SIGINT kills.

    SIGUSR1 is a scheduler's warning that the time is nearly up: SIGTERM follows, while the ranks are still saving.
    """
    told, times = Told(), [float("-inf")]

    def forward(signum: int, frame: object) -> None:
        times.append(time.monotonic())
        if signum in told.seen and times[-1] - times[-2] < SAME_SECONDS:
            return
        told.seen.append(signum)
        insists = signum != signal.SIGUSR1 and len([s for s in told.seen if s != signal.SIGUSR1]) > 1
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                if rank.process.pid is not None and not _has_ended(rank):
                    if insists and rank.number not in told.killed:
                        told.killed.append(rank.number)
                        if processes.is_suspended(rank.process.pid):
                            told.suspended.append(rank.number)
                    os.kill(rank.process.pid, signal.SIGKILL if insists else signum)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield told
        return
    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(ranks: list[Rank]) -> Rank | None:
    """Waits for all children; gives the one that is the cause of a failure, or None.

    After a failure the others get GRACE_SECONDS. A rank that died without a word is the cause; of those that report,
    the one with the earliest error: the others may only have lost their peer. Reports are taken as they come: one that
    is larger than the pipe holds its process up until then.
    """
    failures: list[Rank] = []
    deadline: float | None = None
    waiting = list(ranks)
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        reports = [rank.pipe for rank in waiting if not rank.silent]
        ready = connection.wait([*reports, *(rank.process.sentinel for rank in waiting)], timeout=left)
        for rank in waiting:
            if rank.pipe in ready:
                _take_report(rank)
        ended = [rank for rank in waiting if rank.process.sentinel in ready]
        for rank in ended:
            _take_end(rank)
            waiting.remove(rank)
        failed = [rank for rank in ended if not _stopped_well(rank) and rank.code != 0]
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
            failures = [rank for rank in failed if rank.report is None]  # a later one may have died of the first
        failures += [rank for rank in failed if rank.report is not None]
    return min(failures, key=lambda rank: rank.report.at if rank.report else 0.0, default=None)


def _has_ended(rank: Rank) -> bool:
    """Whether a rank's process is gone, seen by `_watch` or not; its exit code is left for that one to read."""
    return rank.code is not None or bool(connection.wait([rank.process.sentinel], timeout=0))


def _stopped_well(rank: Rank) -> bool:
    """Whether the rank's function returned because it was told to stop; the others save with it and follow."""
    return rank.code == EXIT_SIGNALLED and rank.report is not None and not rank.report.failure


def _told_to_stop(first: Rank, told: Told, world: int) -> int:
    """128 + the signal that ended a rank, where it was passed on and the rank had no handler (yet), or where it was
    SIGKILL for one that did not stop; else 0.
    """
    ended_by = -(first.code or 0)
    if ended_by == signal.SIGKILL and first.number in told.killed:
        signals = " and ".join(signal.Signals(number).name for number in told.seen[-2:])
        went_on = f"{_named(told.killed)} of {world} had not stopped and had to be killed"
        why = f"; {_named(told.suspended)} had been suspended (SIGSTOP, Ctrl-Z)" if told.suspended else ""
        print(f"isotron: interrupted twice ({signals}): {went_on}{why}", file=sys.stderr, flush=True)
        return 128 + ended_by
    return _ended_by(ended_by) if ended_by > 0 and ended_by in told.seen else 0


def _named(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


def _ended_by(signum: int) -> int:
    print(f"isotron: ended by {signal.Signals(signum).name}", file=sys.stderr, flush=True)
    return 128 + signum


def _take_report(rank: Rank) -> None:
    with contextlib.suppress(EOFError, ConnectionResetError):
        rank.report = rank.pipe.recv()
    rank.silent = True


def _take_end(rank: Rank) -> None:
    if not rank.silent and rank.pipe.poll():  # it came while the process was ending
        _take_report(rank)
    rank.process.join()
    rank.code = rank.process.exitcode


def _verdict(first: Rank, ranks: list[Rank]) -> int:
    """Says what happened, once and with the rank's number; the exit code."""
    if first.report is not None and first.report.refused is not None:
        raise first.report.refused
    others = [rank.number for rank in ranks if rank is not first and rank.code is None]
    stopped = f"; stopped with it: {', '.join(map(str, others))}" if others else ""
    lines = [f"isotron: rank {first.number} of {len(ranks)} failed: {processes.describe_exit(first.code)}{stopped}"]
    if first.report is not None and first.report.failure:
        lines.append(first.report.failure.rstrip())
    for rank in ranks:
        if rank is not first and rank.report is not None and rank.report.failure:
            lines.append(f"isotron: then rank {rank.number}: {rank.report.failure.rstrip().splitlines()[-1]}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    code = first.code if first.code is not None else 1
    return code if code > 0 else 128 - code


# ---- what runs in a child ------------------------------------------------------------------------------------------


def _child(pipe: connection.Connection, out: connection.Connection, err: connection.Connection) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    # whole lines, also under PYTHONUNBUFFERED: ranks write side by side
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    report = Report(1)
    try:
        job: Job = pipe.recv()
        os.environ.clear()
        os.environ.update(job.environment)
        os.chdir(job.directory)
        sys.path[:] = job.path
        processes.settle(job.threads)
        report = _report(job)
    except BaseException:
        report = Report(1, failure=traceback.format_exc())
    finally:
        processes.send(pipe, report)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.code)  # an interpreter that ends with threads of gloo alive may abort


def _report(job: Job) -> Report:
    """Runs the function; a group that it leaves open is destroyed."""
    try:
        result = processes.find(job.target)(*job.args)
        return Report(result if isinstance(result, int) else 0)
    except BaseException as error:
        processes.stamp(error)
        return _failed(error)
    finally:
        processes.shutdown()


def _failed(error: BaseException) -> Report:
    at = float(error.__dict__["failed_at"])
    if isinstance(error, OSError):
        error = refuse_file(error) or error
    if isinstance(error, Refused):
        return Report(error.exit_code, refused=error, at=at)
    if isinstance(error, SystemExit):
        return Report(error.code if isinstance(error.code, int) else int(error.code is not None), None, str(error), at)
    if isinstance(error, KeyboardInterrupt):
        return Report(130, None, "interrupted", at)
    return Report(1, None, traceback.format_exc(), at)
