"""Timelines as events, predicted and measured in one form, and the trace file that Perfetto opens. PURE.

A trace has one process per rank and in it a lane each for what was predicted and what was measured, computing above
transfers, so that the two stand one above the other. Times are in microseconds, as the Chrome trace format has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotron.core.parallel.pipeline.actions import Action, Kind
from isotron.core.parallel.pipeline.simulate import Report

LANES = ("predicted compute", "predicted transfers", "measured compute", "measured transfers", "measured waiting")


@dataclass(frozen=True)
class Event:
    """Something that took from `start` to `end` on a rank, in one of `LANES`; times in one unit of the caller's."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    facts: dict[str, Any] = field(default_factory=dict)


def predicted(report: Report) -> list[Event]:
    """The events of a simulated step, in the unit of its costs."""
    events = [
        Event(rank, LANES[0], str(span.action), span.start, span.end, _facts(span.action))
        for rank, row in enumerate(report.spans)
        for span in row
    ]
    for travel in report.travels:
        facts = {"from": travel.source, "to": travel.target}
        events.append(Event(travel.source, LANES[1], str(travel.action), travel.start, travel.end, facts))
    return events


def _facts(action: Action) -> dict[str, Any]:
    first = {"stage": action.stage, "microbatch": action.microbatch}
    return first if action.also is None else {**first, "beside": str(action.also)}


def trace_file(events: Iterable[Event], unit_us: float, facts: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON of a trace; `unit_us`: microseconds per unit of the events' times."""
    events = list(events)
    out: list[dict[str, Any]] = []
    for rank in sorted({e.rank for e in events}):
        out.append(_named("process_name", rank, 0, name=f"rank {rank}"))
        out.append(_named("process_sort_index", rank, 0, sort_index=rank))
        for lane in (LANES.index(name) for name in LANES if any(e.rank == rank and e.lane == name for e in events)):
            out.append(_named("thread_name", rank, lane, name=LANES[lane]))
            out.append(_named("thread_sort_index", rank, lane, sort_index=lane))
    for e in events:
        out.append(
            {
                "name": e.name,
                "cat": kind_of(e.name),
                "ph": "X",
                "pid": e.rank,
                "tid": LANES.index(e.lane),
                "ts": round(e.start * unit_us, 3),
                "dur": round((e.end - e.start) * unit_us, 3),
                "args": e.facts,
            }
        )
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": facts or {}}


def _named(what: str, rank: int, lane: int, **facts: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": facts}


def kind_of(name: str) -> str:
    """F, B, W, SEND_F, ... of an action's text."""
    return Action.parse(name.partition("&")[0]).kind.value


def read_events(trace: dict[str, Any], lane: str = "", kinds: Sequence[Kind] = ()) -> list[Event]:
    """The events of a trace file again, in microseconds; of one lane and of some kinds if given."""
    wanted = {kind.value for kind in kinds}
    found = []
    for e in trace["traceEvents"]:
        if e["ph"] == "X" and (not lane or LANES[e["tid"]] == lane) and (not wanted or e["cat"] in wanted):
            found.append(Event(e["pid"], LANES[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"], e["args"]))
    return found
