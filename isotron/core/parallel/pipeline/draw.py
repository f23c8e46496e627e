"""A table as a picture in text: one line per rank, time to the right. PURE."""

from __future__ import annotations

from math import ceil

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.simulate import Costs, simulate

FILL = {Kind.F: ">", Kind.B: "<", Kind.W: "w"}


def grid(schedule: Schedule, costs: Costs | None = None) -> list[str]:
    """One line per rank, columns proportional to time: `3>` forward, `3<<<` backward, `3ww` weight gradient of 3.

    With several stages per rank a letter says which of them (a, b, ...); `.` is idle time.
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
    return lines


def _label(schedule: Schedule, rank: int, action: Action) -> str:
    """The microbatch, with the letter of the stage where the rank holds several; a pair as two of them."""
    stages = schedule.stages_of(rank)

    def one(part: Action) -> str:
        letter = "" if len(stages) == 1 else chr(ord("a") + stages.index(part.stage) % 26)
        return f"{letter}{part.microbatch}"

    return "&".join(map(one, action.parts))
