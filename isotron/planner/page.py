"""A plan as one HTML page that needs nothing beside itself. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from isotron.core.parallel.pipeline.picture import svg
from isotron.core.parallel.pipeline.simulate import Costs, simulate
from isotron.planner.amounts import in_words
from isotron.planner.block_time import Place
from isotron.planner.charts import Point, bars, plot
from isotron.planner.hardware import GIB
from isotron.planner.job import Job
from isotron.planner.memory import KINDS
from isotron.planner.time import stage_seconds

MOST_RANKS = 32  # of a timeline; more lines are too thin to read
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#1b1b1b}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.8em}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 9px;text-align:right;border-bottom:1px solid #ddd}
.grid{stroke:#e4e4e4}.limit{stroke:#b0493b;stroke-width:1.5;stroke-dasharray:5 3}
.frontier-line{fill:none;stroke:#3b6fb0}.frontier{fill:#3b6fb0}.best{fill:#3f9b57}.compared{fill:#c98a2b}
.chosen{fill:#b0493b}.over{color:#999}.warning{color:#8a4b00}
"""


def page(facts: Mapping[str, Any], job: Job, place: Place, title: str) -> str:
    """Everything that `facts` of a layout, or of a search, say; `job` is the layout, or the one that was chosen."""
    layout = facts.get("chosen", facts)
    parts = [f"<h1>{escape(title)}</h1>", *_head(layout)]
    if "why" in facts:
        parts.append(f'<p class="why">{escape(facts["why"])}</p>')
    parts += [f'<p class="warning">{escape(w)}</p>' for w in layout["warnings"]]
    parts += ["<h2>Memory of a device of every pipeline rank, GiB</h2>", _memory(layout["memory"])]
    kinds = layout["time"]["kinds"]
    parts += ["<h2>Seconds of a step</h2>", bars([("step", kinds)], unit="s"), _times(layout["time"])]
    if job.layout.pp > 1:
        parts += ["<h2>Pipeline, its first microbatches</h2>", timeline(job, place)]
    if "frontier" in facts:
        parts += _search(facts)
    elif layout.get("remedies"):
        parts += ["<h2>Changes that fit</h2>", candidates(layout["remedies"], facts["memory"]["limit"])]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return (
        '<!doctype html>\n<html lang="en"><head>' + head + "</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _head(f: Mapping[str, Any]) -> list[str]:
    lay, u = f["layout"], f["utilisation"]["megatron"]
    shown = ", ".join(f"{k} {v}" for k, v in lay.items())
    sizes = f"{f['micro_batch_size']} x {f['seq_length']} tokens, {f['global_batch_size']} sequences a step"
    out = [
        f"<p>{f['parameters'] / 1e9:.2f} billion parameters on {f['devices']} x {escape(f['device'])}: "
        f"{escape(shown)}; microbatches of {sizes}.</p>",
        f"<p><b>{f['time']['step']:.3f} s</b> a step, <b>{f['tokens_per_s']:,.0f}</b> tokens/s, "
        f"{u['tflops']:.0f} TFLOP/s per device ({u['of_peak']:.1%} of the peak).</p>",
    ]
    if "run" in f:
        r = f["run"]
        out.append(
            f"<p>{in_words(r['tokens'])} tokens: {r['days']:.1f} days, {r['device_hours']:,.0f} device-hours.</p>"
        )
    return out


def _memory(memory: Mapping[str, Any]) -> str:
    rows = [(f"rank {i}", {k: r[k] / GIB for k in KINDS}) for i, r in enumerate(memory["ranks"])]
    return bars(rows, memory["limit"] / GIB, "GiB")


def _times(time: Mapping[str, Any]) -> str:
    rows = [(k, v) for k, v in time["kinds"].items() if v > 1e-4 * time["step"]]
    cells = "".join(f"<tr><td>{k}</td><td>{v:.3f} s</td><td>{v / time['step']:.1%}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>"


def timeline(job: Job, place: Place) -> str:
    """The first microbatches of the table, each stage as long as it is planned to take."""
    if job.layout.pp > MOST_RANKS:
        return f"<p>{job.layout.pp} pipeline ranks are too many to draw; isotron schedule draws any table.</p>"
    m = min(job.microbatches, 2 * job.layout.pp + job.microbatches % job.layout.pp)
    table, stages = job.layout.table(m), stage_seconds(job, place)
    forward, backward = [f.total for f, _ in stages], [b.total for _, b in stages]
    costs = Costs(forward, backward, [b.products / 2 for _, b in stages], 0.0)
    return svg(table, simulate(table, costs), f"{table.name}, {m} of {job.microbatches} microbatches")


def _search(facts: Mapping[str, Any]) -> list[str]:
    named = [("frontier", r) for r in facts["frontier"]] + [("best", r) for r in facts["best"][1:]]
    named += [("compared", r) for r in facts["compared"]] + [("chosen", r) for r in facts["best"][:1]]
    points = [Point(r["step"], r["memory"] / GIB, _name(r), kind) for kind, r in named]
    note = "Blue: nothing is both faster and smaller. Green: the fastest that fit. Orange: compared. Red: chosen."
    rows = [*facts["best"], *facts["compared"]]
    return [
        *("<h2>Time against memory</h2>", f"<p>{note}</p>", plot(points, facts["limit"] / GIB)),
        *("<h2>Candidates</h2>", candidates(rows, facts["limit"])),
        *("<h2>The frontier</h2>", candidates(facts["frontier"], facts["limit"])),
    ]


def _name(r: Mapping[str, Any]) -> str:
    text = ", ".join(f"{k} {r[k]}" for k in COLUMNS if k in r)
    return f"{text}: {r['step']:.3f} s, {r['memory'] / GIB:.1f} GiB"


COLUMNS = ("change", "tp", "cp", "ep", "pp", "dp", "vpp", "micro_batch_size", "schedule", "recompute", "zero")


def candidates(rows: Sequence[Mapping[str, Any]], limit: float) -> str:
    """A table of layouts; those over the limit are grey."""
    columns = [c for c in COLUMNS if any(c in r for r in rows)]
    head = _line("th", [*columns, "step s", "GiB", "bubble"], "")
    lines = [
        _line(
            "td",
            [*(r.get(c, "") for c in columns), f"{r['step']:.3f}", f"{r['memory'] / GIB:.1f}", f"{r['bubble']:.1%}"],
            ' class="over"' if r["memory"] > limit else "",
        )
        for r in rows
    ]
    return f'<table class="candidates">{head}{"".join(lines)}</table>'


def _line(cell: str, values: Iterable[Any], attribute: str) -> str:
    return f"<tr{attribute}>" + "".join(f"<{cell}>{escape(str(v))}</{cell}>" for v in values) + "</tr>"
