"""Fresh processes in milliseconds: what the pool and the launcher have in common.

A fork server loads torch once; every process forked from it starts in about 0.1 s instead of 4 s. This file holds the
context, the names by which functions travel, and what every child does first. torch is imported in children only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from isotron import birth
from isotron.core.errors import refuse
from isotron.exits import STOP_SIGNALS

PRELOAD = ["torch", "torch.distributed", "isotron.processes"]
WATCH_SECONDS = 1.0


def check_platform(platform: str = sys.platform) -> None:
    """Refuses systems without POSIX processes, naming what to use instead; call it before anything is started."""
    if platform == "win32":
        raise refuse(
            "isotron on Windows",
            "isotron starts its processes the POSIX way, which Windows itself does not offer",
            "run the same command in WSL2 (`wsl --install`, then a Linux Python), or on Linux or macOS",
        )


def start(target: Callable[..., None], args: Sequence[Any], name: str, job: str = "") -> BaseProcess:
    """Starts `target(*args)` in a process forked from the server; `target` must not live in `__main__`.

    A server that is not there yet loads the module of `job`, a function's name, once for all processes.
    """
    check_platform()
    context = multiprocessing.get_context("forkserver")
    # of what is not ours an import may fail, and must do so where it is reported
    context.set_forkserver_preload([*PRELOAD, job.partition(":")[0]] if job.startswith("isotron.") else PRELOAD)
    process = context.Process(target=target, args=tuple(args), name=name)
    with _main_hidden(), _born_well(), _deaf():
        process.start()
    return process


def kill(process: BaseProcess) -> None:
    """Ends a process and everything that it started itself, at once, and reaps it."""
    if process.pid is not None and process.exitcode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the child is the leader of its own group, see settle()
        process.kill()
    process.join(timeout=10)


def describe_exit(code: int | None) -> str:
    """`exit code 3`, or the signal's name where a signal ended the process (negative codes)."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped until somebody lets it go on; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def reference(function: Callable[..., Any]) -> str:
    """The name `module:function` (or `file.py:function`) by which another process finds a function."""
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in function.__qualname__:
        raise refuse(
            f"a process that runs {name}",
            "lambdas and nested functions cannot be found by name from another process",
            "move the function to the top level of a module",
        )
    if function.__module__ != "__main__":
        return name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"{spec.name}:{function.__qualname__}"
    path = getattr(main, "__file__", None)
    if path is None:
        raise refuse(
            f"a process that runs {name}",
            "a function typed at a prompt cannot be found from another process",
            "put the function into a file and import it",
        )
    return f"{os.path.abspath(path)}:{function.__qualname__}"


def find(name: str) -> Callable[..., Any]:
    """The function behind `module:function` or `file.py:function`."""
    where, _, qualname = name.rpartition(":")
    found: Any = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    for part in qualname.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def send(pipe: connection.Connection, message: Any) -> None:
    """Sends by plain pickling: torch's own reductions would share memory with a process that may be killed."""
    pipe.send_bytes(pickle.dumps(message))


def settle(threads: int) -> None:
    """What every child does first: own process group, end with its parent, the asked number of threads."""
    os.setpgid(0, 0)  # a Ctrl-C at the terminal reaches the parent only, which decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see _deaf
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no name look-ups, nothing listens to the outside
    import torch

    torch.set_num_threads(threads)


def shutdown() -> None:
    """Destroys the process groups; call it in a `finally`, since a process that exits with one open may abort."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def stamp(error: BaseException) -> None:
    """Notes when an error arose: tearing down its groups makes other ranks fail too, and theirs must come later."""
    error.__dict__.setdefault("failed_at", time.time())


def end_with_launcher() -> None:
    """For processes that another launcher started: end when it does, so that its crash leaves no orphan."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_parent() -> None:
    """Kills this process group when the parent is gone: children of the fork server do not notice by themselves."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    while not connection.wait([parent.sentinel], timeout=WATCH_SECONDS):
        try:
            os.kill(parent.pid, 0)
        except ProcessLookupError:
            break
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _load_file(path: str) -> types.ModuleType:
    """A script, imported once under the name that keeps its `if __name__ == "__main__"` part from running."""
    known = sys.modules.get("__mp_main__")
    if known is not None and getattr(known, "__file__", None) == path:
        return known
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Children do not run the parent's script again: functions travel by name, so they do not need it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """The fork server is born deaf to stop signals, which a whole process group may get (`timeout` sends them so): it
    would end, and with it the ranks. What comes to this process meanwhile is delivered afterwards.
    """
    resource_tracker.ensure_running()  # now, since its start gives the signals back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _born_well() -> Iterator[None]:
    """What a process reads at its very start, so that the fork server must be born with it: spinning OpenMP threads
    cost 10x where processes share cores, and the heap is set for tensors.
    """
    added = birth.settings(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
