"""A table as a picture in text: one line per rank, time to the right. PURE."""

from __future__ import annotations

from math import ceil

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.live import chooses_sums
from isotron.core.parallel.pipeline.simulate import Costs, Report, simulate

FILL = {Kind.F: ">", Kind.B: "<", Kind.W: "w"}


def grid(schedule: Schedule, costs: Costs | None = None) -> list[str]:
    """One line per rank, columns proportional to time: `3>` forward, `3<<<` backward, `3ww` weight gradient of 3.

    With several stages per rank a letter says which of them (a, b, ...); `.` is idle time. Where gradients are reduced
    more than once, a line below each rank says when: `r`, or the letter of the stage.
    """
    report = simulate(schedule, costs)
    labels = [[_label(schedule, rank, span.action) for span in row] for rank, row in enumerate(report.spans)]
    widest = [
        (len(text) + 1, span.end - span.start)
        for row, names in zip(report.spans, labels, strict=True)
        for span, text in zip(row, names, strict=True)
        if span.end > span.start
    ]
    scale = max((width / time for width, time in widest), default=1.0)
    if all(span.start == int(span.start) for row in report.spans for span in row):
        scale = ceil(scale)
    lines = []
    for rank, (row, names) in enumerate(zip(report.spans, labels, strict=True)):
        line = ["."] * round(report.makespan * scale)
        for span, text in zip(row, names, strict=True):
            start, end = round(span.start * scale), round(span.end * scale)
            line[start:end] = text.ljust(end - start, FILL[span.action.kind])[: end - start]
        lines.append(f"rank {rank:<{len(str(len(labels) - 1))}} |{''.join(line)}|")
        if chooses_sums(schedule):
            lines.append(" " * lines[-1].index("|") + " " + _sums(schedule, rank, report, scale))
    return lines


def _sums(schedule: Schedule, rank: int, report: Report, scale: float) -> str:
    """Marks under the ends of what stands before each REDUCE; one further to the right where the place is taken."""
    stages, marks = schedule.stages_of(rank), dict[int, str]()
    for action, time in report.moments[rank]:
        if action.kind is Kind.REDUCE:
            at = max(round(time * scale) - 1, max(marks, default=-1) + 1)
            marks[at] = "r" if len(stages) == 1 else _letter(stages.index(action.stage))
    return "".join(marks.get(at, " ") for at in range(max(marks, default=-1) + 1))


def _letter(number: int) -> str:
    return chr(ord("a") + number % 26)


def _label(schedule: Schedule, rank: int, action: Action) -> str:
    """The microbatch, with the letter of the stage where the rank holds several; a pair as two of them."""
    stages = schedule.stages_of(rank)

    def one(part: Action) -> str:
        letter = "" if len(stages) == 1 else _letter(stages.index(part.stage))
        return f"{letter}{part.microbatch}"

    return "&".join(map(one, action.parts))
