"""Whether a step may change the weights, and what happens when it may not.

A step is suspect when its loss or gradient norm is not finite, or when its loss is far above the recent ones. Loss and
norm are equal on all ranks and so are the loss's history and every decision made from them: nothing is exchanged.

A suspect step is not applied. With `rerun` it is taken again, on the same weights and data: the same numbers bit for
bit mean that the model or the data is at fault, others that a device computed wrongly once, and the step that came out
well is used. A suspect step that stays so is skipped, ends the run, or sends it back to its last checkpoint, from where
it goes on behind the data that led there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isotron.core.errors import refuse
from isotron.core.precision.scaler import LossScaler
from isotron.exits import EXIT_FAILED
from isotron.train.config import FaultConfig
from isotron.train.step import StepResult

HISTORY = 32  # losses of applied steps that a spike is measured against
FEWEST = 8  # with fewer, nothing is a spike


class Rewind(Exception):
    """The run is to go back to its last checkpoint and to leave out the data up to the end of this step."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step}: {why}")
        self.step, self.why = step, why


@dataclass(frozen=True)
class Verdict:
    """What was found out about a suspect step: why it was one, and whether a second run gave the same ("" if none)."""

    why: str
    kind: str = ""


class Judge:
    """`recent`: losses of applied steps, oldest first; part of what a checkpoint holds, and changed in place.

    `before_update` returns when the weights may change. `scaler`: hears of each step once, after the verdict, so that a
    second run has the scale of the first; as long as its scale can fall, a gradient that overflows is no fault.
    """

    def __init__(
        self,
        cfg: FaultConfig,
        recent: list[float],
        before_update: Callable[[], None] = lambda: None,
        scaler: LossScaler | None = None,
    ) -> None:
        self.cfg, self.recent = cfg, recent
        self._before_update, self._scaler = before_update, scaler or LossScaler(1.0, dynamic=False)
        self._why = ""

    def admits(self, loss: float, norm: float) -> bool:
        """Called by a step before it changes anything: whether it may. Returns when weights may be written."""
        self._why = self._suspicion(loss, norm)
        if self._why or not (math.isfinite(loss) and math.isfinite(norm)):
            return False
        self._before_update()
        return True

    def _suspicion(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss:g}"
        if not math.isfinite(norm):
            return "" if self._scaler.can_fall else f"the gradient norm is {norm:g}"
        usual = sum(self.recent) / len(self.recent) if len(self.recent) >= FEWEST else math.inf
        if self.cfg.spike_factor and loss > self.cfg.spike_factor * usual:
            return f"the loss is {loss:g}, {loss / usual:.3g} times the mean of the last {len(self.recent)}"
        return ""

    def step(self, take: Callable[[], StepResult], number: int) -> tuple[StepResult, Verdict | None]:
        """Take step `number`, again if it is suspect and that is asked; its result, and a verdict where it was suspect.

        Raises Refused or Rewind as the policy says.
        """
        result, verdict = take(), None
        if self._why:
            verdict, first = Verdict(self._why), result
            if self.cfg.rerun:
                result = take()
                same = _same(first.loss, result.loss) and _same(first.grad_norm, result.grad_norm)
                verdict = Verdict(verdict.why, "persistent" if same else "transient")
            if self._why:
                self._act(number, result, verdict)
        if result.overflow or not result.skipped:  # a spike that is left out tells nothing of the scale
            self._scaler.update(result.overflow)
        if not result.skipped:
            self.recent.append(result.loss)
            del self.recent[:-HISTORY]
        return result, verdict

    def _act(self, number: int, result: StepResult, verdict: Verdict) -> None:
        policy = self.cfg.on_nan if result.overflow else self.cfg.on_spike
        if policy == "rewind":
            raise Rewind(number, verdict.why)
        if policy == "stop":
            again = f"; run again in place, the fault was {verdict.kind}" if verdict.kind else ""
            raise refuse(
                f"training on after step {number - 1}",
                f"step {number} was not applied: {verdict.why} (loss {result.loss:g}, gradient norm "
                f"{result.grad_norm:g}){again}",
                "--on-nan skip (--on-spike skip) to leave such steps out, or rewind to go back and leave the data out",
                exit_code=EXIT_FAILED,
            )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
