"""What a run writes down: `metrics.jsonl` in the run directory, and the same numbers to the console and to trackers.

One JSON object per line: a step, an evaluation ("eval") or an event ("event"). Floats are written with full precision;
JSON has no NaN and no infinity, so such a value is null and named under "nonfinite". Only the first rank writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from isotron.core.errors import Refused
from isotron.train.config import LogConfig
from isotron.train.console import Console, perplexity
from isotron.train.flops import utilisation
from isotron.train.record import StepRecord
from isotron.train.trackers import Tracker, open_trackers, require_trackers

__all__ = ["FILE", "Metrics", "StepRecord", "cut", "json_line"]

FILE = "metrics.jsonl"


class Metrics:
    """The log of one run, opened after step `resume_step`; lines of an earlier attempt after that step are cut.

    Every rank makes one; with `is_main` False nothing is written. Refuses trackers that are asked for and not
    installed. `stream`: of the console lines, stdout by default.
    """

    def __init__(
        self, run_dir: Path, log: LogConfig, is_main: bool, resume_step: int, stream: TextIO | None = None
    ) -> None:
        require_trackers(log)
        self._step, self._peak = resume_step, None  # type: int, float | None
        self._file: TextIO | None = None
        self._trackers: list[Tracker] = []
        self._console = Console(log.log_interval, stream)
        if not is_main:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE
        removed = cut(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        self._trackers, notices = open_trackers(run_dir, log, resume_step)
        if removed:
            notices.append(f"isotron: {path}: {removed} lines of an earlier attempt after step {resume_step} cut")
        for notice in notices:
            self._console.say(notice)

    def start(
        self,
        step: int,
        total_steps: int,
        world: int,
        layout: Any,
        peak_flops: float | None = None,
        counts: tuple[int, int] = (0, 0),
    ) -> None:
        """The event that marks a start or a resume after `step`, with the world and its layout.

        `layout`: a dataclass or a mapping. `peak_flops`: FLOP/s that one device can do in this dtype, for `mfu`; None
        where it is not known. `counts`: skipped and NaN steps of the run until now.
        """
        self._peak = peak_flops
        if self._file is None:
            return
        facts = dataclasses.asdict(layout) if dataclasses.is_dataclass(layout) else dict(layout)  # type: ignore[arg-type]
        self._step = step
        self.event("start", step=step, total_steps=total_steps, world=world, layout=facts)
        for tracker in self._trackers:
            tracker.describe({"total_steps": total_steps, "world": world, "layout": facts})
        self._console.start(step, total_steps, counts)

    def step(self, record: StepRecord) -> None:
        """One training step."""
        self._step = record.step
        if self._file is None:
            return
        line: dict[str, Any] = {
            "step": record.step,
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "tokens": record.tokens,
            "consumed_samples": record.consumed_samples,
            "step_time_s": record.step_time_s,
            "data_wait_s": record.data_wait_s,
            "tokens_per_s": record.tokens_per_s,
            "tflops_per_device": record.tflops_per_device,
            "mfu": utilisation(record.flops_per_s_per_device, self._peak),
            "skipped": record.skipped,
            "sample_ids": list(record.sample_ids),
            **{f"aux/{name}": value for name, value in record.aux.items()},
        }
        self._write(line)
        self._track({**line, "loss_scale": record.loss_scale} if record.loss_scale is not None else line)
        self._console.step(record)

    def evaluation(self, step: int, name: str, loss: float, tokens: int, seconds: float) -> None:
        """Loss per token on held-out data called `name` ("valid", "valid/NAME"): over how many tokens, in what time."""
        if self._file is None:
            return
        line = {"step": step, "eval": name, "eval_loss": loss, "eval_ppl": perplexity(loss)}
        self._write({**line, "tokens": tokens, "eval_time_s": seconds})
        self._track({"step": step, f"eval_loss/{name}": loss, f"eval_ppl/{name}": perplexity(loss)})
        self._console.evaluation(step, name, loss)

    def task(self, step: int, found: Mapping[str, Any], seconds: float) -> None:
        """What a task of isotron evaluate came to, `found` being its JSON; `seconds` since the tasks began."""
        if self._file is None:
            return
        values = {name: numbers["value"] for name, numbers in found["metrics"].items()}
        self._write({"step": step, **found, "eval_time_s": seconds})
        self._track({"step": step, **{f"task/{found['task']}/{name}": value for name, value in values.items()}})
        self._console.task(step, found["task"], values)

    def event(self, name: str, **fields: Any) -> None:
        """Something that happened, with the last step and the time of day unless `fields` say otherwise."""
        if self._file is not None:
            now = datetime.now().astimezone().isoformat(timespec="milliseconds")
            self._write({"event": name, "step": self._step, **fields, "time": now})

    @contextlib.contextmanager
    def forgiving(self, event: str, what: str) -> Iterator[None]:
        """Around what a run can do without: a failure is an event and a line, and no more."""
        try:
            yield
        except (Refused, OSError) as error:
            self.failed(event, what, error)

    def failed(self, event: str, what: str, error: Refused | OSError) -> None:
        """Something that the run goes on without."""
        why = "; ".join(p.case for p in error.problems) if isinstance(error, Refused) else str(error)
        self.event(event, why=why)
        self.say(f"isotron: {what}: {why}")

    def rewind(self, step: int) -> None:
        """The run goes on from an earlier step: lines after it are cut, as on a resume."""
        self._step = step
        if self._file is not None:
            path = Path(self._file.name)
            self._file.close()
            cut(path, step)
            self._file = path.open("a", encoding="utf-8")

    def say(self, line: str) -> None:
        """A line for the console alone, above the progress bar."""
        if self._file is not None:
            self._console.say(line)

    def close(self) -> None:
        """Ends the bar and closes files; further calls write nothing."""
        if self._file is None:
            return
        self._console.close()
        for tracker in self._trackers:
            tracker.close()
        self._file.close()
        self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json_line(line))
            self._file.flush()

    def _track(self, line: Mapping[str, Any]) -> None:
        values = {k: float(v) for k, v in line.items() if k != "step" and isinstance(v, (int, float))}
        for tracker in self._trackers:
            tracker.scalars(line["step"], values)


def json_line(fields: Mapping[str, Any]) -> str:
    """One line of valid JSON; values that are no finite numbers are null and listed under "nonfinite"."""
    odd = {k: repr(v) for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)}
    clean = {k: None if k in odd else v for k, v in fields.items()}
    return json.dumps({**clean, "nonfinite": odd} if odd else clean, allow_nan=False) + "\n"


def cut(path: Path, step: int) -> int:
    """Removes lines after `step`, and what an interrupted write left, all at once; returns how many were removed."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _counts(line, step)]
    if len(kept) == len(lines):
        return 0
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as f:
        f.writelines(kept)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    return len(lines) - len(kept)


def _counts(line: bytes, step: int) -> bool:
    """Whether a line is whole and not after `step`."""
    if not line.endswith(b"\n"):
        return False
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("step", 0) <= step
