"""A simulated table as an SVG picture: one line per rank, time to the right. PURE."""

from __future__ import annotations

from html import escape

from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.simulate import Report

FILL = {Kind.F: ("#4a7fc1", "#9dbde3"), Kind.B: ("#3f9b57", "#9fd3ad"), Kind.W: ("#c98a2b", "#eccb98")}
MARKS = {Kind.REDUCE: "#c22", Kind.UNSHARD: "#222", Kind.RESHARD: "#888"}
NAMES = {Kind.F: "forward", Kind.B: "backward or input gradient", Kind.W: "weight gradient"}
NAMES |= {Kind.REDUCE: "gradients reduced", Kind.UNSHARD: "weights gathered", Kind.RESHARD: "weights dropped"}
LEFT, LINE, WIDTH = 60, 24, 1200
STYLE = "text{font:10px sans-serif;fill:#111}.n{font-size:12px}rect{stroke:#fff;stroke-width:.5}"


def svg(schedule: Schedule, report: Report, title: str = "") -> str:
    """The whole picture; a rank's first stage is dark, its later ones light, and overlapped pairs share a cell."""
    scale = WIDTH / max(report.makespan, 1e-12)
    height = LINE * (len(report.spans) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {height}" role="img">',
        f"<title>{escape(title or schedule.name)}</title><style>{STYLE}</style>",
        f'<rect width="100%" height="{height}" fill="#fff"/>',
        f'<text class="n" x="4" y="16">{escape(title or schedule.name)}</text>',
    ]
    for rank, row in enumerate(report.spans):
        top = LINE * (rank + 1)
        parts.append(f'<text class="n" x="4" y="{top + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{LINE - 3}" fill="#eee"/>')
        own = schedule.stages_of(rank)
        for span in row:
            share = (LINE - 3) / len(span.action.parts)
            for i, part in enumerate(span.action.parts):
                x, width = LEFT + span.start * scale, (span.end - span.start) * scale
                parts.append(_cell(part, own, x, top + i * share, width, share))
        for action, time in report.moments[rank] if report.moments else ():
            parts.append(_moment(action, LEFT + time * scale, top))
    parts.append(_legend(LINE * (len(report.spans) + 2)))
    return "\n".join([*parts, "</svg>", ""])


def _cell(part: Action, own: tuple[int, ...], x: float, y: float, width: float, height: float) -> str:
    shade = FILL[part.kind][min(own.index(part.stage), 1)]
    tip = f"<title>{escape(str(part))}</title>"
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{shade}">{tip}</rect>'
    fits = width > 6 * len(str(part.microbatch))
    label = f'<text x="{x + 2:.2f}" y="{y + height / 2 + 3.5:.2f}">{part.microbatch}</text>' if fits else ""
    return box + label


def _moment(action: Action, x: float, y: float) -> str:
    """A mark where a stage's weights or gradients come, go or meet."""
    tip, tall = f"<title>{escape(str(action))}</title>", LINE - 3
    return f'<rect class="m" x="{x - 1:.2f}" y="{y}" width="2" height="{tall}" fill="{MARKS[action.kind]}">{tip}</rect>'


def _legend(y: float) -> str:
    out, x = [], LEFT
    for kind, name in NAMES.items():
        color = FILL[kind][0] if kind in FILL else MARKS[kind]
        out.append(f'<rect x="{x}" y="{y}" width="{14 if kind in FILL else 2}" height="14" fill="{color}"/>')
        out.append(f'<text class="n" x="{x + 20}" y="{y + 11}">{name}</text>')
        x += 200
    return "".join(out)
