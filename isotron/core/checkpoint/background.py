"""Save a checkpoint while training goes on.

`start` is called after an optimizer step and only notes what is to be saved. A thread copies it into kept host buffers
while the next forward and backward read the same tensors; whoever is about to change them calls `wait_staged` first.
The same thread then does what `save_checkpoint` does, on a group of its own: files, hashes, sync, rename, pointer. A
failure is kept until the caller asks, and is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isotron.core.checkpoint.ranks import Ranks, together
from isotron.core.checkpoint.save import ExtraFiles, Saved, save_checkpoint
from isotron.core.checkpoint.staging import Buffers
from isotron.core.errors import refuse

POLITE = 19  # added to the niceness of the writing thread: training that wants all cores gives it almost none


class _Job:
    """One save in progress: its thread, whether its copies are made, and how it ended."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged = threading.Event()
        self.ended = threading.Event()
        self.path: Path | None = None
        self.error: Exception | None = None


class BackgroundSaver:
    """Saves of one process, one at a time. `ranks`: a group that nothing but this saver uses."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffers = Buffers()
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        directory: str | Path,
        step: int,
        tensors: Sequence[Saved],
        meta: dict[str, Any],
        keep_last: int = 0,
        keep_every: int = 0,
        extra_files: ExtraFiles | None = None,
    ) -> None:
        """Begin to save; the arguments are `save_checkpoint`'s. Every rank calls it, after asking about the last save.

        `meta` is kept as it is and must not change. Raises RuntimeError when an earlier save was not asked about.
        """

        def write(placed: list[Saved]) -> Path:
            return save_checkpoint(directory, step, placed, meta, self._ranks, keep_last, extra_files, keep_every)

        self.begin(step, tensors, write)

    def begin(self, step: int, tensors: Sequence[Saved], write: Callable[[list[Saved]], Path]) -> None:
        """Begin to save by `write`, which gets the copies and returns where the step is; else as `start`."""
        if self._job is not None:
            raise RuntimeError(f"step {self._job.step} is still being saved; call wait() first")
        job = self._job = _Job(step)

        def work() -> None:
            try:
                job.path = write(self._stage(job, tensors))
            except Exception as error:  # the caller hears of it in wait()
                job.error = error
            finally:
                job.staged.set()
                job.ended.set()

        self._thread = threading.Thread(target=work, name=f"isotron-save-{step}", daemon=True)
        self._thread.start()

    def _stage(self, job: _Job, tensors: Sequence[Saved]) -> list[Saved]:
        """The copies; where one rank has no memory for them, all ranks refuse together."""

        def copy() -> list[Saved]:
            placed = self._buffers.lay_out(tensors)
            self._buffers.copy()
            return placed

        try:
            placed, _ = together(self._ranks, f"copy step {job.step} to host memory", lambda: _released(copy, job))
        finally:
            job.staged.set()
        _be_polite()
        return placed

    def wait_staged(self) -> None:
        """Return when the tensors of the save in progress may change; at once when there is none."""
        if self._job is not None:
            self._job.staged.wait()

    def ended(self) -> bool:
        """Whether a save has ended, well or not, and has not been asked about."""
        return self._job is not None and self._job.ended.is_set()

    def failed(self) -> bool:
        """Whether a save has ended in a failure that `wait` will raise."""
        return self._job is not None and self._job.ended.is_set() and self._job.error is not None

    def wait(self) -> Path | None:
        """The finished step directory of the save in progress, None when there is none; raises what made it fail."""
        job, self._job = self._job, None
        if job is None:
            return None
        job.ended.wait()
        if job.error is not None:
            raise job.error
        return job.path

    def close(self, seconds: float = 10.0) -> None:
        """Give a save in progress some time to end; what it did not finish is no checkpoint."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._job = None


def _released(copy: Any, job: _Job) -> list[Saved]:
    """The copies, and the word that they are made: training need not wait for the agreement of the ranks."""
    try:
        placed: list[Saved] = copy()
        return placed
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as a RuntimeError
        fix = "save without --async-save, or use more ranks: the copies take as much host memory as the state"
        raise refuse(f"--async-save at step {job.step}", f"no memory for the copies: {error}", fix, 1) from error
    finally:
        job.staged.set()


def _be_polite() -> None:
    """Lower this thread's priority, where a thread has one of its own."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + POLITE)
