"""Fitting the numbers of `efficiency.py` on a part of the published runs, and the error on the rest. PURE.

Runs fall into groups of one model at one scale; a third of each source's groups is held out. Within a stack the numbers
are shared by all devices and formats, except the share of the peak. How strongly they are held to their starting values
is chosen per stack by cross-validation over the groups that are not held out: few runs need a strong hold, or they are
learned by heart. `python -m isotron.planner.calibrate` fits and writes `data/efficiency.json`; a test holds the errors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median
from zlib import crc32

from isotron.planner.efficiency import RANGES, STACKS, Fractions, Stack, fitted
from isotron.planner.published import Case, by_source, cases
from isotron.planner.time import step_seconds

OWN = ("matmul", "attention")  # the first per device and format, the second per device
# weights of staying near the starting values, as parts of the ranges, against mean absolute log errors
PRIORS = (0.03, 0.1, 0.3, 1.0)
FOLDS = 4
ROUNDS = 16


def split(found: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """(calibration, held out): every third group of each source, in an order that only names decide."""
    held = set()
    for _, own in by_source(list(found)):
        held |= set(_shuffled(own)[1::3])
    return [c for c in found if c.group not in held], [c for c in found if c.group in held]


def _shuffled(own: Sequence[Case]) -> list[str]:
    """The groups of some runs, in an order that only names decide."""
    return sorted({c.group for c in own}, key=lambda g: crc32(g.encode()))


def ratio(case: Case, stack: Stack) -> float:
    """Predicted over measured time of a step."""
    return step_seconds(case.job, case.place({stack.name: stack})).total / case.seconds


def _keys(own: Sequence[Case]) -> list[str]:
    return sorted({f"{c.device.name}/{c.form}" for c in own})


def chosen_prior(stack: Stack, own: Sequence[Case], rounds: int = ROUNDS) -> float:
    """The weight with the smallest mean error on groups that are left out in turn."""
    groups = _shuffled(own)
    folds = [set(groups[i::FOLDS]) for i in range(min(FOLDS, len(groups)))]

    def error(prior: float) -> float:
        found = []
        for out in folds:
            made = fit(stack, [c for c in own if c.group not in out], prior, rounds)
            found += [abs(ratio(c, made) - 1) for c in own if c.group in out]
        return sum(found) / len(found)

    return PRIORS[0] if len(folds) < 2 else min(PRIORS, key=error)


def fit(stack: Stack, own: Sequence[Case], prior: float, rounds: int = ROUNDS) -> Stack:
    """The stack with numbers fitted to its runs: steps along one number at a time, halved when none helps."""
    start = Fractions()
    shared = {n: getattr(start, n) for n in RANGES if n not in OWN}
    keys = _keys(own)
    matmul = dict.fromkeys(keys, start.matmul)
    attention = dict.fromkeys((k.split("/")[0] for k in keys), start.attention)
    numbers = [(shared, n, getattr(start, n), RANGES[n]) for n in shared]
    numbers += [(matmul, k, start.matmul, RANGES["matmul"]) for k in matmul]
    numbers += [(attention, k, start.attention, RANGES["attention"]) for k in attention]

    def made() -> Stack:
        found = {k: Fractions(matmul=matmul[k], attention=attention[k.split("/")[0]], **shared) for k in keys}
        return replace(stack, fractions=found)

    def loss() -> float:
        now = made()
        error = sum(abs(log(ratio(c, now))) for c in own) / len(own)
        return error + prior * sum(
            (log(table[n] / first) / log(high / low)) ** 2 for table, n, first, (low, high) in numbers
        )

    _descend([(table, n, limits) for table, n, _, limits in numbers], loss, rounds)
    return _with_defaults(made())


def _descend(
    numbers: list[tuple[dict[str, float], str, tuple[float, float]]], loss: Callable[[], float], rounds: int
) -> None:
    best, steps = loss(), [0.4] * len(numbers)
    for _ in range(rounds):
        for i, (table, name, (low, high)) in enumerate(numbers):
            before = table[name]
            for sign in (1, -1):
                table[name] = min(high, max(low, before * exp(sign * steps[i])))
                now = loss()
                if now < best - 1e-6:
                    best, steps[i] = now, min(0.6, steps[i] * 1.5)
                    break
                table[name] = before
            else:
                steps[i] *= 0.5


def _with_defaults(stack: Stack) -> Stack:
    """For devices without runs of their own: the mean over devices of each format."""
    found = dict(stack.fractions)
    for form in {k.split("/")[1] for k in stack.fractions}:
        values = [v for k, v in stack.fractions.items() if k.endswith(f"/{form}")]
        mean = {n: sum(getattr(v, n) for v in values) / len(values) for n in OWN}
        found[f"*/{form}"] = replace(values[0], **mean)
    return replace(stack, fractions=found)


@dataclass(frozen=True)
class Score:
    """Errors of step time over some runs of one source, as fractions."""

    source: str
    runs: int
    median: float
    mean: float
    worst: float


def score(source: str, own: Sequence[Case], stacks: Mapping[str, Stack]) -> Score:
    """Median, mean and worst absolute error."""
    errors = [abs(ratio(c, stacks[c.stack]) - 1) for c in own]
    return Score(source, len(own), median(errors), sum(errors) / len(errors), max(errors))


def scores(found: Sequence[Case], stacks: Mapping[str, Stack]) -> list[Score]:
    """A score per source."""
    return [score(source, own, stacks) for source, own in by_source(list(found))]


def main(only: Sequence[str] = ()) -> int:
    """Fit every stack, or some by name, and write the file."""
    train, held = split(cases())
    stacks = dict(fitted())
    for name, stack in STACKS.items():
        if only and name not in only:
            continue
        own = [c for c in train if c.stack == name]
        prior = chosen_prior(stack, own)
        stacks[name] = fit(stack, own, prior)
        print(f"{name}: {len(own)} runs, prior {prior}", file=sys.stderr)
    rows = {n: {k: {a: float(f"{b:.4g}") for a, b in asdict(f).items()} for k, f in s.fractions.items()}
            for n, s in stacks.items()}  # fmt: skip
    path = Path(__file__).parent / "data" / "efficiency.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for name, part in (("fitted on", train), ("held out", held)):
        for s in scores(part, stacks):
            print(
                f"{name:<10} {s.source:<12} {s.runs:>4} runs  "
                f"median {s.median:6.1%}  mean {s.mean:6.1%}  worst {s.worst:6.1%}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
