"""Pictures of a plan as SVG: stacked bars, and points of time against memory. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

COLOURS = (
    *("#3b6fb0", "#7ba7d9", "#b5cfee", "#8f6bb3", "#3f9b57", "#8fcf9f", "#c98a2b", "#eccb98", "#b0493b", "#999999"),
    *("#5b5b5b", "#d08fb8", "#6fb8b0", "#c9c04a"),
)
LEFT, WIDTH, LINE = 90, 900, 22


@dataclass(frozen=True)
class Point:
    """A layout in the plot: seconds, bytes in GiB, what it is, and its kind (a class of the page's style)."""

    x: float
    y: float
    text: str
    kind: str


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], limit: float = 0.0, unit: str = "") -> str:
    """A line per row, its parts one behind the other; `limit` is a vertical line. Parts that are 0 are left out."""
    kinds = [k for k in rows[0][1] if any(parts[k] > 0 for _, parts in rows)]
    most = max([limit, *(sum(parts.values()) for _, parts in rows)]) * 1.04 or 1.0
    scale, height = WIDTH / most, LINE * len(rows)
    out = [_open("bars", height + 50)]
    for i, (name, parts) in enumerate(rows):
        x, top = float(LEFT), LINE * i + 4
        out.append(f'<text x="4" y="{top + 13}">{escape(name)}</text>')
        for kind in kinds:
            wide = parts[kind] * scale
            tip = f"<title>{escape(name)}: {escape(kind)} {parts[kind]:.3g} {unit}</title>"
            colour = COLOURS[list(rows[0][1]).index(kind) % len(COLOURS)]
            out.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{LINE - 4}" fill="{colour}">{tip}</rect>'
            )
            x += wide
        out.append(f'<text x="{x + 4:.1f}" y="{top + 13}">{sum(parts.values()):.3g}</text>')
    if limit:
        at = LEFT + limit * scale
        out.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height + 6}"/>')
        out.append(f'<text x="{at - 4:.1f}" y="{height + 18}" text-anchor="end">limit {limit:.3g} {unit}</text>')
    return "\n".join([*out, _legend(kinds, list(rows[0][1]), height + 24), "</svg>"])


def _open(kind: str, height: float) -> str:
    return f'<svg class="{kind}" viewBox="0 0 {LEFT + WIDTH + 60} {height:.0f}" role="img">'


def _legend(kinds: Sequence[str], order: Sequence[str], y: float) -> str:
    out, x = [], 4
    for kind in kinds:
        out.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLOURS[order.index(kind) % len(COLOURS)]}"/>')
        out.append(f'<text x="{x + 15}" y="{y + 10}">{escape(kind)}</text>')
        x += 30 + 7 * len(kind)
    return "".join(out)


def plot(points: Sequence[Point], limit: float) -> str:
    """Seconds of a step to the right, GiB upwards, both from 0; the points of kind "frontier" are joined."""
    high, bottom = 360, 330
    most_x, most_y = max(p.x for p in points) * 1.08, max([limit, *(p.y for p in points)]) * 1.08

    def at(p: Point) -> tuple[float, float]:
        return LEFT + p.x / most_x * WIDTH, bottom - p.y / most_y * (bottom - 10)

    out = [_open("plot", high)]
    for step in ticks(most_x):
        x = LEFT + step / most_x * WIDTH
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{bottom}"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{step:g} s</text>')
    for step in ticks(most_y):
        y = bottom - step / most_y * (bottom - 10)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{step:g} GiB</text>')
    y = bottom - limit / most_y * (bottom - 10)
    out.append(f'<line class="limit" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p) for p in points if p.kind == "frontier"))
    out.append(f'<polyline class="frontier-line" points="{line}"/>')
    for p in points:
        x, y = at(p)
        tip = f"<title>{escape(p.text)}</title>"
        out.append(
            f'<circle class="{p.kind}" cx="{x:.1f}" cy="{y:.1f}" r="{7 if p.kind == "chosen" else 4}">{tip}</circle>'
        )
    return "\n".join([*out, "</svg>"])


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, five to ten of them."""
    power = 10.0 ** floor(log10(most))
    step = next(s for s in (0.1, 0.2, 0.5, 1.0) if most / (s * power) <= 10) * power
    return [round(i * step, 10) for i in range(int(most / step) + 1)]
