"""Where a run's checkpoints go, and for each place what it means that one cannot be written there."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from isotron.core.checkpoint.background import BackgroundSaver
from isotron.core.checkpoint.near import Near
from isotron.core.errors import Refused
from isotron.train.copies import Copies
from isotron.train.metrics import Metrics
from isotron.train.nextloss import Facts, NextLoss
from isotron.train.state import TrainState, save_near, save_state, start_save

Files = dict[str, bytes | Path]


class Destination(ABC):
    """One place for checkpoints of `state`, with further `files`.

    `writes`: whether this rank writes what lies beside them. `step`: the step whose checkpoint is there or being
    written, -1 for none; the same on all ranks.
    """

    def __init__(self, state: TrainState, files: Files, metrics: Metrics, writes: bool) -> None:
        self.state, self.files, self.metrics = state, files, metrics
        self.step = -1
        self._next_loss = NextLoss(writes)

    @abstractmethod
    def write(self, saver: BackgroundSaver | None) -> Path | None:
        """Write a checkpoint of the state as it is, or begin to where there is a `saver`; all ranks fail together."""

    @abstractmethod
    def failure(self, again: bool = False) -> AbstractContextManager[None]:
        """Around what may fail: whether the run goes on without this checkpoint. `again`: it will be written anew."""

    def saved(self, path: Path) -> None:
        """The checkpoint of `step` is complete."""
        with self._beside():
            self._next_loss.saved(self.step, path)

    def after_step(self, facts: Facts) -> None:
        """A step has been taken: what a run that resumes from the one before must find."""
        if self.step == facts.step - 1:
            with self._beside():
                self._next_loss.after(facts)

    def _beside(self) -> AbstractContextManager[None]:
        """A checkpoint without its next loss is complete: nothing will be compared."""
        what = "the loss after a checkpoint could not be written beside it"
        return self.metrics.forgiving("next_loss_failed", what)


class RunDirectory(Destination):
    """The run's own directory, whose checkpoints count and are copied away.

    One that fails ends the run, or with `on_save_failure` continue costs it this checkpoint; the ones that were there
    stay. `before_write(step)` is called when a save begins.
    """

    def __init__(
        self,
        state: TrainState,
        directory: Path,
        files: Files,
        metrics: Metrics,
        copies: Copies,
        before_write: Callable[[int], None] = lambda step: None,
    ) -> None:
        super().__init__(state, files, metrics, writes=state.ranks.rank == 0)
        self.directory, self.copies, self._before_write = directory, copies, before_write

    def write(self, saver: BackgroundSaver | None) -> Path | None:
        """Collective."""
        self.step = self.state.step
        self._before_write(self.step)
        if saver is None:
            return save_state(self.state, self.directory, self.files)
        start_save(self.state, self.directory, self.files, saver)
        return None

    def saved(self, path: Path) -> None:
        """The copy begins, and it is said."""
        super().saved(path)
        self.copies.begin(path)
        self.metrics.event("saved", step=self.step, path=str(path))
        self.metrics.say(f"isotron: saved {path}")

    @contextlib.contextmanager
    def failure(self, again: bool = False) -> Iterator[None]:
        """Ends the run unless it is to continue, or writes anew."""
        try:
            yield
        except Refused as refusal:
            self.step = -1
            if not again and self.state.config.checkpoint.on_save_failure == "stop":
                raise
            what = "a checkpoint could not be written, the ones before it are as they were"
            self.metrics.failed("save_failed", what, refusal)


class NodeDirectories(Destination):
    """The nodes' own directories: one that fails is reported and no more, those in the run's directory count."""

    def __init__(self, state: TrainState, near: Near, files: Files, metrics: Metrics) -> None:
        super().__init__(state, files, metrics, writes=near.leads)
        self.near = near

    def write(self, saver: BackgroundSaver | None) -> Path | None:
        """Collective."""
        self.step = self.state.step
        return save_near(self.state, self.near, self.files, saver)

    def saved(self, path: Path) -> None:
        """An event."""
        super().saved(path)
        self.metrics.event("saved_locally", step=self.step, path=str(path))

    @contextlib.contextmanager
    def failure(self, again: bool = False) -> Iterator[None]:
        """Reported."""
        what = "a checkpoint in the nodes' own directories could not be written"
        with self.metrics.forgiving("local_save_failed", what):
            try:
                yield
            except (Refused, OSError):
                self.step = -1
                raise
