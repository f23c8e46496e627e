"""Faults on purpose, to see that a run survives them: `--inject KIND@STEP:RANK ..`, each once per run directory.

| kind      | what happens on that rank                                                      |
|-----------|--------------------------------------------------------------------------------|
| kill      | SIGKILL before the step                                                        |
| kill-save | SIGKILL while the checkpoint of the step is written, its first file half done  |
| term      | SIGTERM before the step: the run saves and stops                               |
| hang      | the rank stands still before the step                                          |
| slow      | the step takes a second longer                                                 |
| nan       | a weight is NaN while the step is computed, also when it is computed again     |
| glitch    | a weight is NaN the first time that the step is computed                       |
| bitflip   | one bit of a weight changes after the step                                     |
| diskfull  | the disk has no room for the checkpoint of the step                            |
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from isotron.config.fault_words import Fault
from isotron.core.checkpoint import save
from isotron.core.parallel.model import ParallelModel

SLOW_SECONDS = 1.0
DIRECTORY = "injected"


class Injector:
    """The faults of this rank; those that are marked as done in `run_dir` do not happen again."""

    def __init__(self, words: Sequence[str], rank: int, run_dir: Path) -> None:
        self._marks = run_dir / DIRECTORY
        mine = [fault for fault in map(Fault.parse, words) if fault.rank == rank]
        self._spoiling: Fault | None = None
        self._left = [fault for fault in mine if not (self._marks / str(fault)).exists()]

    def _due(self, step: int, *kinds: str) -> Fault | None:
        """A fault of these kinds at this step, marked as done; None when there is none."""
        for fault in self._left:
            if fault.step == step and fault.kind in kinds:
                self._left.remove(fault)
                self._marks.mkdir(parents=True, exist_ok=True)
                (self._marks / str(fault)).touch()
                return fault
        return None

    def before_step(self, step: int) -> None:
        """Whatever ends, stops or delays this process before it takes the step."""
        while fault := self._due(step, "kill", "term", "hang", "slow"):
            if fault.kind == "slow":
                time.sleep(SLOW_SECONDS)
            elif fault.kind == "hang":
                time.sleep(10**6)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)

    @contextlib.contextmanager
    def while_computing(self, step: int, model: ParallelModel, attempt: int) -> Iterator[None]:
        """Spoils a weight for the time of the computation."""
        if attempt == 0:
            self._spoiling = self._due(step, "nan", "glitch")
        elif self._spoiling is not None and self._spoiling.kind == "glitch":
            self._spoiling = None
        if self._spoiling is None:
            yield
            return
        model.wait_weights()
        weight = _weight(model)
        before = weight.clone()
        weight.fill_(math.nan)
        try:
            yield
        finally:
            weight.copy_(before)

    def after_step(self, step: int, model: ParallelModel) -> None:
        """One bit of a weight."""
        if self._due(step, "bitflip"):
            model.wait_weights()
            weight = _weight(model)
            weight.view(torch.uint8)[0] ^= 1

    def before_save(self, step: int) -> None:
        """The next files that this process writes for a checkpoint meet the fault."""
        fault = self._due(step, "diskfull", "kill-save")
        if fault is not None:
            meet = _no_room if fault.kind == "diskfull" else _die_half_way
            patcher: Any = patch.object(save, "write_staged")
            patched = patcher.start()
            patched.side_effect = lambda directory, staged: (patcher.stop(), meet(directory))


def _weight(model: ParallelModel) -> torch.Tensor:
    """One element that is used in every step: of the last parameter of this rank's last stage."""
    parameter = list(list(model.stages.values())[-1].module.parameters())[-1]
    return parameter.data.view(-1)[:1]


def _no_room(directory: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def _die_half_way(directory: Path) -> None:
    with (directory / "rank_torn.safetensors").open("wb") as torn:
        torn.write(b"\x10\0\0\0\0\0\0\0{")
        torn.flush()
    os.kill(os.getpid(), signal.SIGKILL)
