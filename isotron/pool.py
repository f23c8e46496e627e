"""A pool of N gloo processes on this machine: run one function on every rank, in milliseconds.

Tests, `verify` and `doctor` use it. The parent imports no torch. A worker that dies or is late fails the call; the pool
is then killed and built again on the next call. Between two calls a worker forgets seeds, default dtype, gradient mode,
environment variables and the process groups that the function made.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.process import BaseProcess
from typing import Any

from isotron import processes
from isotron.core.errors import Problem, Refused

GRACE_SECONDS = 2.0  # how long the others may still answer once one rank has failed
START_SECONDS = 180.0  # the first start loads torch


class RanksFailed(RuntimeError):
    """Some ranks failed; `failures` maps each to its traceback or the way it ended."""

    def __init__(self, headline: str, failures: dict[int, str]) -> None:
        self.failures = failures
        parts = [headline, *(f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(failures.items()))]
        super().__init__("\n".join(parts))


class RanksLate(RanksFailed, TimeoutError):
    """Some ranks had not answered when the time was up."""


@dataclass(frozen=True)
class Request:
    """One call: the function's name, its arguments, and the generation of the process group to run in."""

    function: str
    args: tuple[Any, ...]
    generation: int
    path: list[str]


@dataclass(frozen=True)
class Reply:
    """What a rank answers: a result, or a refusal, or a traceback; `dirty` asks for a new process group."""

    result: Any = None
    refused: Refused | None = None
    failure: str | None = None
    dirty: bool = False


class Pool:
    """`world` persistent gloo processes with one thread each; started by the first `run`."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"a pool has at least one rank, not {world}")
        self.world = world
        self._workers: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []
        self._directory = ""
        self._generation = 0

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls `fn(*args)` on every rank and returns the results by rank; `timeout` in seconds.

        `fn` is a top-level function of an importable module. Raises `Refused` where that is what the ranks raised,
        `RanksLate` when the time is up, `RanksFailed` with every failing rank's traceback otherwise.
        """
        request = Request(processes.reference(fn), args, self._generation, list(sys.path))
        if not self._workers:
            self._start(request.function)
        try:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen as a dead worker below
                    processes.send(pipe, request)
            replies, late = self._collect(time.monotonic() + timeout)
        except BaseException:  # interrupted: answers still under way must not be taken for the next call's
            self.close()
            raise
        return self._judge(request.function, replies, late, timeout)

    def close(self) -> None:
        """Ends the workers at once; a later `run` starts new ones."""
        for worker in self._workers:
            processes.kill(worker)
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while the pool is not running."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def _start(self, function: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="isotron-pool-")
        for rank in range(self.world):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            self._workers.append(
                processes.start(_serve, (theirs, rank, self.world, self._directory), f"isotron-rank-{rank}", function)
            )
            theirs.close()  # now the worker alone holds it, and its death is an end of file here
        replies, late = self._collect(time.monotonic() + START_SECONDS)
        self._judge("the start of the pool", replies, late, START_SECONDS)

    def _collect(self, deadline: float) -> tuple[dict[int, Reply], list[int]]:
        """Replies by rank, and the ranks that gave none; a dead worker's reply is a failure."""
        replies: dict[int, Reply] = {}
        waiting = list(range(self.world))
        while waiting and (left := deadline - time.monotonic()) > 0:
            handles = [self._pipes[rank] for rank in waiting]
            connection.wait([*handles, *(self._workers[rank].sentinel for rank in waiting)], timeout=left)
            for rank in list(waiting):
                reply = self._answer(rank)
                if reply is None:
                    continue
                waiting.remove(rank)
                replies[rank] = reply
                if reply.failure or reply.refused:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies, waiting

    def _answer(self, rank: int) -> Reply | None:
        """A rank's reply where it has one; the way it died where it died; else None."""
        pipe, worker = self._pipes[rank], self._workers[rank]
        gone = not worker.is_alive()  # asked before the pipe: a last reply may still lie in it
        try:
            if pipe.poll():
                reply: Reply = pipe.recv()
                return reply
        except (EOFError, ConnectionResetError):
            gone = True
        if not gone:
            return None
        worker.join(timeout=1.0)
        return Reply(failure=f"the process died ({processes.describe_exit(worker.exitcode)})")

    def _judge(self, name: str, replies: dict[int, Reply], late: list[int], timeout: float) -> list[Any]:
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        refusals = [reply.refused for _, reply in sorted(replies.items()) if reply.refused]
        if any(reply.dirty for reply in replies.values()):
            self._generation += 1
        if not (failures or refusals or late):
            return [replies[rank].result for rank in range(self.world)]
        if failures or late or len(refusals) < self.world:
            self.close()  # a group in which some ranks went on without the others is of no use
        if refusals and not failures:
            raise _merged(refusals)
        if not failures:
            waiting = {rank: f"no answer after {timeout:g} s" for rank in late}
            raise RanksLate(f"{name}: {len(late)} of {self.world} ranks are late", waiting)
        for refusal, rank in ((reply.refused, rank) for rank, reply in replies.items() if reply.refused):
            failures[rank] = str(refusal)
        for rank in late:
            failures[rank] = "still waiting when the others had failed"
        raise RanksFailed(f"{name} failed on {len(failures) - len(late)} of {self.world} ranks", failures)


def _merged(refusals: list[Refused]) -> Refused:
    """All ranks' problems, each once."""
    problems: dict[Problem, None] = {problem: None for refusal in refusals for problem in refusal.problems}
    return Refused(problems, refusals[0].exit_code)


# ---- the cached pools ----------------------------------------------------------------------------------------------

_pools: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """The pool of this size, made on first use and closed when Python ends."""
    if not _pools:
        atexit.register(close_all)
    if world not in _pools:
        _pools[world] = Pool(world)
    return _pools[world]


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`fn(*args)` on `world` ranks of a cached pool; results by rank."""
    return pool(world).run(fn, *args, timeout=timeout)


def close_all() -> None:
    """Ends every cached pool's processes."""
    for cached in _pools.values():
        cached.close()
    _pools.clear()


# ---- what runs in a worker -----------------------------------------------------------------------------------------


def _serve(pipe: connection.Connection, rank: int, world: int, directory: str) -> None:
    """A worker's life: answer requests until the parent closes the pipe."""
    processes.settle(threads=1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = dict(os.environ)
    joined = -1
    processes.send(pipe, Reply())
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # arguments of a class that this process cannot import
            processes.send(pipe, Reply(failure=traceback.format_exc()))
            continue
        _reset(environment)
        try:
            if request.generation != joined:
                _join(rank, world, directory, request.generation)
                joined = request.generation
            reply = _run(request)
        except BaseException:
            reply = Reply(failure=traceback.format_exc(), dirty=True)
        _answer_with(pipe, reply)


def _run(request: Request) -> Reply:
    sys.path[:] = request.path  # the parent may have learned new places since this process started
    try:
        result = processes.find(request.function)(*request.args)
    except Refused as refused:
        return Reply(refused=refused, dirty=_dirty())
    except BaseException:  # SystemExit and a test's own outcomes count as failures too
        return Reply(failure=traceback.format_exc(), dirty=True)
    return Reply(result=result, dirty=_dirty())


def _answer_with(pipe: connection.Connection, reply: Reply) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        processes.send(pipe, reply)
    except Exception:  # a result that cannot be pickled
        processes.send(pipe, Reply(failure=traceback.format_exc(), dirty=reply.dirty))


def _join(rank: int, world: int, directory: str, generation: int) -> None:
    """A new default group under a prefix of its own: keys of an earlier group would be taken for living peers."""
    from datetime import timedelta

    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore(f"generation{generation}", dist.FileStore(f"{directory}/{generation}", world))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))


def _dirty() -> bool:
    """Whether the function left process groups behind, or took the default one away."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return True
    groups = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)  # private: unknown counts as dirty
    return groups is None or len(groups) != 1


def _reset(environment: dict[str, str]) -> None:
    """The state that a function may have left behind in this process."""
    import random

    import numpy
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # asked first: the call itself loads torch's compiler
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
