"""The loss of the step after a checkpoint, kept beside it and compared by the run that resumes from it.

What a step computes depends on weights, data and position alone, so a resumed run's first loss is known: it is what the
run that saved found, to rounding. Nothing is computed for this. The file `next.json` lies beside the manifest and is no
part of the checkpoint; where it is missing (the run ended before the next step), nothing is compared.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotron.config.schema import RunConfig, to_dict
from isotron.core.errors import refuse

FILE = "next.json"
# relative, of a mean over all tokens of a batch, whatever the layout
TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


@dataclass(frozen=True)
class Facts:
    """A step: its number, the samples consumed up to its end, its loss."""

    step: int
    consumed_samples: int
    loss: float


class NextLoss:
    """The file beside the checkpoints of one place. `writes`: whether this rank writes it."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes
        self._saved: tuple[int, Path] | None = None
        self._facts: Facts | None = None

    def saved(self, step: int, path: Path) -> None:
        """The checkpoint of a step is complete. Raises OSError where the file cannot be written."""
        self._saved = step, path
        self._write()

    def after(self, facts: Facts) -> None:
        """The step after one whose checkpoint is there, or being written. Raises OSError as `saved`."""
        if math.isfinite(facts.loss):
            self._facts = facts
            self._write()

    def _write(self) -> None:
        if not self._writes or self._saved is None or self._facts is None:
            return
        step, path = self._saved
        if self._facts.step - 1 == step:
            new = path / f"{FILE}.tmp"
            new.write_text(json.dumps(self._facts.__dict__), encoding="utf-8")
            os.replace(new, path / FILE)


def compare(expected: Facts, found: Facts, dtype: str) -> None:
    """Refuse to go on where a step gives another loss than it gave the run that saved."""
    if (expected.step, expected.consumed_samples) != (found.step, found.consumed_samples):
        return
    if not abs(found.loss - expected.loss) <= TOLERANCE[dtype] * abs(expected.loss):
        was, now = expected.loss, found.loss
        raise refuse(
            f"resume at step {found.step - 1}",
            f"step {found.step} gives the loss {now!r} on the batch on which the run that saved found {was!r}",
            "--no-resume-check if something that changes the loss was changed on purpose; else load another step",
            exit_code=1,
        )


def read_expected(step_dir: Path, saved: dict[str, Any], now: RunConfig) -> Facts | None:
    """What the first step must give; None without the file, or where the run computes something else than before."""
    try:
        raw = json.loads((step_dir / FILE).read_text(encoding="utf-8"))
        facts = Facts(int(raw["step"]), int(raw["consumed_samples"]), float(raw["loss"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a crash may have come between the checkpoint and this file
    present = json.loads(json.dumps(to_dict(now)))
    old = saved.get("config", {})
    same = all(old.get(section) == present[section] for section in ("model", "data", "tokenizer"))
    fixed = all(old.get("train", {}).get(leaf) == present["train"][leaf] for leaf in ("seed", "dtype"))
    return facts if same and fixed else None
