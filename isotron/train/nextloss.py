"""The loss of the step after a checkpoint, kept beside it and compared by the run that resumes from it.

What a step computes depends on weights, data and position alone, so a resumed run's first loss is known: it is what the
run that saved found, to rounding. Nothing is computed for this. The file `next.json` lies beside the manifest and is no
part of the checkpoint; where it is missing (the run ended before the next step), nothing is compared.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
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
    """The comparison of one run, and the files that it leaves for the next one.

    `writes`: whether this rank writes the file of a checkpoint, by where checkpoints go ("far": the run's directory,
    "near": a node's own). `expected`: of the first step of this run, from the checkpoint that it resumed from; None to
    compare nothing.
    """

    def __init__(
        self, writes: Mapping[str, bool] | None = None, expected: Facts | None = None, dtype: str = "float32"
    ) -> None:
        self._writes, self._expected, self._dtype = writes or {}, expected, dtype
        self._paths: dict[str, tuple[int, Path]] = {}
        self._facts: dict[str, Facts] = {}

    def saved(self, step: int, path: Path, where: str) -> None:
        """The checkpoint of a step is complete. Raises OSError where the file cannot be written."""
        self._paths[where] = (step, path)
        self._write(where)

    def after(self, facts: Facts, follows: Iterable[str]) -> None:
        """A step has been taken; `follows`: where the one before it was saved, or is being saved.

        Refuses to go on where the first loss after a resume is not what it must be. Raises OSError as `saved`.
        """
        expected, self._expected = self._expected, None
        if expected is not None and (expected.step, expected.consumed_samples) == (facts.step, facts.consumed_samples):
            _compare(expected.loss, facts.loss, facts.step, self._dtype)
        for where in follows if math.isfinite(facts.loss) else ():
            self._facts[where] = facts
            self._write(where)

    def _write(self, where: str) -> None:
        step, path = self._paths.get(where, (-1, Path()))
        facts = self._facts.get(where)
        if self._writes.get(where) and facts is not None and facts.step - 1 == step:
            new = path / f"{FILE}.tmp"
            new.write_text(json.dumps(facts.__dict__), encoding="utf-8")
            os.replace(new, path / FILE)


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
