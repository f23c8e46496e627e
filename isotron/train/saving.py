"""When a run writes its checkpoints, at once or in the background, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isotron.core.checkpoint.background import BackgroundSaver
from isotron.train.destinations import Destination, NodeDirectories, RunDirectory
from isotron.train.faults import Watchdog
from isotron.train.nextloss import Facts, compare
from isotron.train.state import TrainState


@dataclass
class Saves:
    """The checkpoints of a run.

    `near`: None for a run without them. `saver`: saves in the background, None for saves that are waited for.
    `expected`: of the first step of this run, from the checkpoint that it resumed from; None to compare nothing.
    """

    state: TrainState
    far: RunDirectory
    watchdog: Watchdog
    near: NodeDirectories | None = None
    saver: BackgroundSaver | None = None
    expected: Facts | None = None
    _under_way: Destination | None = None

    def save(self) -> None:
        """A save in the run's directory that is due."""
        self._save(self.far)

    def save_near(self) -> None:
        """A save in the nodes' own directories that is due."""
        if self.near is not None:
            self._save(self.near)

    def _save(self, place: Destination) -> None:
        self.settle()
        path = None
        with place.failure(), self.watchdog.phase("save"):
            path = place.write(self.saver)
            self._under_way = None if self.saver is None else place
        _tell(place, path)

    def save_last(self) -> None:
        """See that a checkpoint of this step is on the disk; the save that a run ends with must succeed."""
        self.settle(again=True)
        if self.far.step != self.state.step:
            with self.watchdog.phase("save"):
                path = self.far.write(None)
            _tell(self.far, path)
        self.far.copies.end()

    def wait_staged(self) -> None:
        """Return when a save in the background has read weights and optimizer state."""
        if self.saver is not None:
            with self.watchdog.phase("copying the state for a save"):
                self.saver.wait_staged()

    def failing(self) -> bool:
        """Whether this rank knows of a save in the background that failed."""
        return self.saver is not None and self.saver.failed()

    def settle(self, again: bool = False) -> None:
        """Wait for a save in the background to end. Every rank calls it after the same step.

        A failure is one on all ranks: they have agreed on it in the background. `again`: the run saves anew, or goes
        back, and it is reported only.
        """
        place, self._under_way = self._under_way, None
        if place is None or self.saver is None:
            return
        path = None
        with place.failure(again), self.watchdog.phase("save"):
            path = self.saver.wait()
        _tell(place, path)

    def look(self, failed_somewhere: bool) -> None:
        """After a step: hear of a save that has ended. `failed_somewhere`: agreed by all ranks."""
        ended = self.saver is not None and self.saver.ended() and not self.saver.failed()
        if failed_somewhere or ended:
            self.settle()

    def after_step(self, loss: float) -> None:
        """A step has been taken: refuses to go on where the first loss after a resume is not what it must be."""
        facts, expected = Facts(self.state.step, self.state.consumed_samples, loss), self.expected
        self.expected = None
        if expected is not None:
            compare(expected, facts, self.state.config.train.dtype)
        for place in (self.far, self.near):
            if place is not None:
                place.after_step(facts)

    def gone_back(self) -> None:
        """The run goes on from an earlier step, on other data: what the nodes have beyond it is forgotten."""
        self.far.step = -1
        if self.near is not None:
            self.near.step = -1
            self.near.near.forget(self.state.step)


def _tell(place: Destination, path: Path | None) -> None:
    if path is not None:
        place.saved(path)
