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
    """`expected`: of the first step of this run, from the checkpoint that it resumed from; None to compare nothing."""

    def __init__(self, writes: bool, expected: Facts | None = None, dtype: str = "float32") -> None:
        self._writes, self._expected, self._dtype = writes, expected, dtype
        self._paths: dict[int, Path] = {}
        self._facts: dict[int, Facts] = {}

    def saved(self, step: int, path: Path) -> None:
        """The checkpoint of a step is complete."""
        self._paths = {step: path}
        self._write(step)

    def after(self, facts: Facts, follows_save: bool) -> None:
        """A step has been taken; `follows_save`: the one before it was saved, or is being saved.

        Refuses to go on where the first loss after a resume is not what it must be.
        """
        expected, self._expected = self._expected, None
        if expected is not None and (expected.step, expected.consumed_samples) == (facts.step, facts.consumed_samples):
            _compare(expected.loss, facts.loss, facts.step, self._dtype)
        if follows_save and math.isfinite(facts.loss):
            self._facts = {facts.step - 1: facts}
            self._write(facts.step - 1)

    def _write(self, step: int) -> None:
        if self._writes and step in self._paths and step in self._facts:
            new = self._paths[step] / f"{FILE}.tmp"
            new.write_text(json.dumps(self._facts[step].__dict__), encoding="utf-8")
            os.replace(new, self._paths[step] / FILE)


def _compare(expected: float, found: float, step: int, dtype: str) -> None:
    if not abs(found - expected) <= TOLERANCE[dtype] * abs(expected):
        raise refuse(
            f"resume at step {step - 1}",
            f"step {step} gives the loss {found!r} on the batch on which the run that saved found {expected!r}",
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
