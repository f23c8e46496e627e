"""Curves in other programs: TensorBoard files in the run directory, and Weights & Biases where a project is named."""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from isotron.core.errors import refuse
from isotron.train.config import LogConfig


class Tracker(Protocol):
    """Something that draws curves."""

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Take in facts about the run."""
        ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the values of one step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def require_trackers(log: LogConfig) -> None:
    """Refuses a run whose curves cannot go where they were asked to; every rank calls it, only the first one writes."""
    if log.wandb_project and find_spec("wandb") is None:
        raise refuse(
            f"--wandb-project {log.wandb_project}",
            "the package wandb is not installed",
            "pip install wandb, or leave --wandb-project out: metrics.jsonl and TensorBoard files are written anyway",
        )


def open_trackers(run_dir: Path, log: LogConfig, resume_step: int) -> tuple[list[Tracker], list[str]]:
    """The trackers that were asked for, and lines that say what is missing."""
    found: list[Tracker] = []
    notices = []
    if log.tensorboard:
        try:
            found.append(TensorBoard(run_dir / "tensorboard", resume_step))
        except ImportError as error:
            notices.append(f"isotron: no TensorBoard files ({error}); pip install tensorboard, or --no-tensorboard")
    if log.wandb_project:
        found.append(WeightsAndBiases(run_dir, log))
    return found, notices


class TensorBoard:
    """Event files under `directory`; what an earlier attempt wrote after `resume_step` is hidden by the new file."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        # the writer itself: torch's wrapper of it loads far more
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(directory), flush_secs=10)
        log: Any = self._event.SessionLog
        self._add(resume_step + 1, session_log=log(status=log.START))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Nothing: TensorBoard shows curves only."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve."""
        points = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step, summary=self._summary.Summary(value=points))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """One run there for one run directory: a resume goes on in the same curves."""

    def __init__(self, run_dir: Path, log: LogConfig) -> None:
        wandb: Any = importlib.import_module("wandb")
        name = run_dir / "wandb_id"
        if not name.exists():
            name.write_text(f"{uuid.uuid4().hex[:12]}\n", encoding="utf-8")
        identity = name.read_text(encoding="utf-8").strip()
        self._run: Any = wandb.init(
            project=log.wandb_project,
            name=log.wandb_exp_name or None,
            id=identity,
            resume="allow",
            dir=str(run_dir),
        )
        # its own step counter cannot go back, as a resume does
        self._run.define_metric("*", step_metric="step")

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Shown as the run's configuration."""
        self._run.config.update(dict(facts), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
