"""What a task comes to: numbers with their standard errors and how many examples they stand on. PURE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Value:
    """A number and its standard error; None where one example, or no formula, gives none."""

    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Result:
    """One task: its numbers by name, its examples, and facts such as counts of tokens and the options it ran with."""

    task: str
    values: Mapping[str, Value]
    examples: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is no finite number is null."""
        metrics = {n: {"value": finite(v.value), "stderr": finite(v.stderr)} for n, v in self.values.items()}
        return {"task": self.task, "metrics": metrics, "examples": self.examples, **self.facts}


def finite(x: float | None) -> float | None:
    """A number for JSON; None for what is no finite number."""
    return x if x is not None and math.isfinite(x) else None


def mean(values: Sequence[float]) -> Value:
    """Their mean; the standard error is sample deviation / sqrt(n)."""
    n = len(values)
    average = sum(values) / n
    if n < 2:
        return Value(average)
    return Value(average, math.sqrt(sum((x - average) ** 2 for x in values) / (n - 1) / n))


@dataclass
class Ratio:
    """A sum over a sum, such as loss per token, gathered part by part without keeping the parts.

    The standard error is that of a ratio of means over the parts: sqrt(n/(n-1) sum (a_i - r b_i)^2) / sum b.
    """

    n: int = 0
    a: float = 0.0
    b: float = 0.0
    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0

    def add(self, a: float, b: float) -> None:
        """One part."""
        self.n += 1
        self.a, self.b = self.a + a, self.b + b
        self.aa, self.ab, self.bb = self.aa + a * a, self.ab + a * b, self.bb + b * b

    def value(self, per: float | None = None) -> Value:
        """The ratio to `per`, which is the sum of the b_i unless given, with its standard error."""
        r = self.a / self.b
        scale = self.b / per if per is not None else 1.0
        if self.n < 2:
            return Value(r * scale)
        spread = max(0.0, self.aa - 2 * r * self.ab + r * r * self.bb)
        return Value(r * scale, math.sqrt(spread * self.n / (self.n - 1)) / self.b * scale)


def exponential(x: Value, limit: float = math.inf) -> Value:
    """exp(x), of at most `limit`; the standard error to first order."""
    top = math.exp(min(x.value, limit, 709.0))
    return Value(top, None if x.stderr is None else top * x.stderr)


def table(results: Sequence[Result]) -> str:
    """One line per number."""
    lines = [f"{'task':<24}{'metric':<24}{'value':>14}{'stderr':>12}{'examples':>10}"]
    for result in results:
        for name, v in result.values.items():
            error = "" if v.stderr is None else f"{v.stderr:.4f}"
            lines.append(f"{result.task:<24}{name:<24}{v.value:>14.4f}{error:>12}{result.examples:>10}")
    return "\n".join(lines)
