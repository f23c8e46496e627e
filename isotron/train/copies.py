"""Copies of a run's checkpoints on remote storage, made while training goes on, one at a time.

The checkpoint on the disk is what counts: a copy that fails is reported and no more. Of a run with copies nothing but
this removes older steps, and only while none is being copied: with `keep_last` 1 and a storage that takes longer than
the save interval, each step would be gone before its copy is complete.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.checkpoint.publish import prune
from isotron.core.checkpoint.remote import push
from isotron.train.faults import Watchdog
from isotron.train.metrics import Metrics


class Copies:
    """The copies of one run. `acts`: on the first rank; elsewhere nothing happens."""

    def __init__(self, given: CheckpointConfig, acts: bool, metrics: Metrics, watchdog: Watchdog) -> None:
        self._given, self._acts = given, acts and bool(given.remote_save)
        self._metrics, self._watchdog = metrics, watchdog
        self._copying: Future[str] | None = None

    def begin(self, step: Path) -> None:
        """Begin to copy a complete step, once the copy before it has ended."""
        if not self._acts:
            return
        self.end()
        keep = self._given.keep_last, self._given.keep_every
        forgiving = self._metrics.forgiving("prune_failed", "older checkpoints could not be removed")
        with forgiving, self._watchdog.phase("save"):
            prune(step.parent, step, *keep)
        once = ThreadPoolExecutor(1, "isotron-copy")
        self._copying = once.submit(push, step, self._given.remote_save, *keep)
        once.shutdown(wait=False)

    def end(self) -> None:
        """Wait for a copy that is under way."""
        copying, self._copying = self._copying, None
        if copying is None:
            return
        forgiving = self._metrics.forgiving("copy_failed", "copying a checkpoint to remote storage failed")
        with forgiving, self._watchdog.phase("copy to remote storage"):
            self._metrics.event("copied", path=copying.result())
