"""When and how a run writes its checkpoints, at once or in the background, and what happens when one cannot be written.

A save that is due may fail (a full disk) and the run may go on, as `on_save_failure` says; the checkpoint that was
there stays. The last save of a run must succeed: nothing else would be left of the steps since the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from isotron.core.checkpoint.background import BackgroundSaver
from isotron.core.checkpoint.near import Near
from isotron.core.errors import Refused
from isotron.train.copies import Copies
from isotron.train.faults import Watchdog
from isotron.train.metrics import Metrics
from isotron.train.nextloss import Facts, NextLoss
from isotron.train.state import TrainState, save_near, save_state, start_save


@dataclass
class Saves:
    """The checkpoints of a run in `directory`.

    `files`: further files of every checkpoint. `saver`: saves in the background, None for saves that are waited for.
    `step`: the step whose checkpoint is there or being written, -1 for none; the same on all ranks.
    `before_write(step)` is called when a save begins. `near`: the nodes' own directories, None for a run without them;
    `near_step`: as `step`, of those.
    """

    state: TrainState
    directory: Path
    files: dict[str, bytes | Path]
    metrics: Metrics
    watchdog: Watchdog
    saver: BackgroundSaver | None = None
    step: int = -1
    next_loss: NextLoss = field(default_factory=NextLoss)
    before_write: Callable[[int], None] = lambda step: None
    near: Near | None = None
    near_step: int = -1
    _near_under_way: bool = False
    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        first = self.state.ranks.rank == 0
        self.copies = Copies(self.state.config.checkpoint, first, self.metrics, self.watchdog)

    @property
    def current(self) -> bool:
        """Whether a checkpoint of the state as it is now is there, or being written."""
        return self.step == self.state.step

    def save(self) -> None:
        """A save that is due. Raises what makes it fail, unless the run is to go on without it."""
        with self._tolerated():
            self.settle()
        if self.saver is None:
            with self._tolerated():
                self._write()
            return
        self.before_write(self.state.step)
        start_save(self.state, self.directory, self.files, self.saver)
        self.step = self.state.step

    def save_near(self) -> None:
        """A save in the nodes' own directories that is due. One that fails is reported and no more."""
        if self.near is None:
            return
        with self._tolerated():
            self.settle()
        with self._forgiven():
            self._near_under_way, self.near_step = self.saver is not None, self.state.step
            with self.watchdog.phase("save"):
                path = save_near(self.state, self.near, self.files, self.saver)
            if path is not None:
                self._say_saved_near(self.near_step, path)

    def save_last(self) -> None:
        """See that a checkpoint of this step is on the disk; the save that a run ends with must succeed."""
        try:
            self.settle()
        except Refused as refusal:
            self._failed(refusal)  # written again now, and if that fails too the run has failed
        if not self.current:
            self._write()
        self.copies.end()

    def wait_staged(self) -> None:
        """Return when a save in the background has read weights and optimizer state."""
        if self.saver is not None:
            with self.watchdog.phase("copying the state for a save"):
                self.saver.wait_staged()

    def failing(self) -> bool:
        """Whether this rank knows of a save in the background that failed."""
        return self.saver is not None and self.saver.failed()

    def settle(self) -> None:
        """Wait for a save in the background to end; raises what made it fail. Every rank calls it after the same step.

        A failure is raised on all ranks: they have agreed on it in the background.
        """
        if self.saver is None or self.saver.step is None:
            return
        step = self.saver.step
        if self._near_under_way:
            self._near_under_way = False
            with self._forgiven(), self.watchdog.phase("save"):
                path = self.saver.wait()
                if path is not None:
                    self._say_saved_near(step, path)
            return
        with self.watchdog.phase("save"):
            path = self.saver.wait()
        self._say_saved(step, path)

    def look(self, failed_somewhere: bool) -> None:
        """After a step: hear of a save that has ended. `failed_somewhere`: agreed by all ranks."""
        if failed_somewhere:
            with self._tolerated():
                self.settle()
        elif self.saver is not None and self.saver.ended() and not self.saver.failed():
            self.settle()

    def _write(self) -> None:
        self.before_write(self.state.step)
        with self.watchdog.phase("save"):
            path = save_state(self.state, self.directory, self.files)
        self.step = self.state.step
        self._say_saved(self.step, path)

    def after_step(self, loss: float) -> None:
        """A step has been taken: its loss is what a run that resumes from the step before must find."""
        state, before = self.state, self.state.step - 1
        follows = [where for where, step in (("far", self.step), ("near", self.near_step)) if step == before]
        with self._told():
            self.next_loss.after(Facts(state.step, state.consumed_samples, loss), follows)

    def _say_saved(self, step: int, path: Path | None) -> None:
        if path is not None:
            with self._told():
                self.next_loss.saved(step, path, "far")
            self.copies.begin(path)
        self.metrics.event("saved", step=step, path=str(path))
        self.metrics.say(f"isotron: saved {path}")

    def _say_saved_near(self, step: int, path: Path) -> None:
        with self._told():
            self.next_loss.saved(step, path, "near")
        self.metrics.event("saved_locally", step=step, path=str(path))

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            if self.state.config.checkpoint.on_save_failure == "stop":
                raise
            self._failed(refusal)

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        """The checkpoints in `directory` are what counts."""
        try:
            yield
        except Refused as refusal:
            case = "; ".join(problem.case for problem in refusal.problems)
            self.metrics.event("local_save_failed", why=case)
            self.metrics.say(f"isotron: a checkpoint in the nodes' own directories could not be written: {case}")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A checkpoint without its next loss is complete: nothing will be compared, and that is said."""
        try:
            yield
        except OSError as error:
            self.metrics.event("next_loss_failed", why=str(error))
            self.metrics.say(f"isotron: the loss after a checkpoint could not be written beside it: {error}")

    def _failed(self, refusal: Refused) -> None:
        self.step = -1
        case = "; ".join(problem.case for problem in refusal.problems)
        self.metrics.event("save_failed", why=case)
        self.metrics.say(f"isotron: a checkpoint could not be written, the ones before it are as they were: {case}")
