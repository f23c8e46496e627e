"""`train --trace N`: the real timeline of steps over all ranks, beside what the simulator predicts for them.

The recorder listens to the pipeline runtime. After the step the ranks' events are put together, the simulator is given
the costs that were measured, and both timelines go into one file under the run directory. Clocks: on one machine all
processes read the same one; over several, each rank's is counted from a barrier at the start of the step.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from isotron.core import comm
from isotron.core import device as devices
from isotron.core.mesh import AXES
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.events import LANES, Event, predicted, trace_file
from isotron.core.parallel.pipeline.runtime import Nobody
from isotron.core.parallel.pipeline.simulate import Costs, simulate

COMPUTE, TRANSFERS, WAITING = LANES[2], LANES[3], LANES[4]


class Recorder:
    """An observer of the runtime that notes when things begin and end, in seconds of this process's clock."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.events: list[Event] = []
        self._posted: dict[Action, float] = {}

    @contextmanager
    def computed(self, action: Action) -> Iterator[None]:
        """A compute action, to the end of what it started on the device."""
        devices.synchronize(self.device)
        start = time.perf_counter()
        yield
        devices.synchronize(self.device)
        facts = {"stage": action.stage, "microbatch": action.microbatch}
        name = str(replace(action, also=None))
        self.events.append(Event(self.rank, COMPUTE, name, start, time.perf_counter(), facts))

    def posted(self, actions: Sequence[Action]) -> None:
        """Transfers were started; a send has no end that its rank would know of."""
        now = time.perf_counter()
        for action in actions:
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                self._posted[action] = now
            else:
                self.events.append(Event(self.rank, TRANSFERS, str(action), now, now))

    @contextmanager
    def arrived(self, action: Action) -> Iterator[None]:
        """The wait for a tensor; its transfer is noted from when it was posted to when it was used."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        posted = self._posted.pop(action, None)
        if posted is not None:  # else it came from a stage of this rank
            self.events.append(Event(self.rank, TRANSFERS, str(action), posted, end, {"waited_s": end - start}))
            self.events.append(Event(self.rank, WAITING, str(action), start, end))


class StepTracer:
    """Records the first `steps` steps of a run into `directory`/trace."""

    def __init__(self, model: ParallelModel, steps: int, directory: Path) -> None:
        self.model, self.left, self.directory = model, steps, directory / "trace"

    @contextmanager
    def step(self, number: int, microbatches: int) -> Iterator[None]:
        """Around step `number` of this rank's `microbatches`; collective while there are steps left to record."""
        if self.left <= 0:
            yield
            return
        self.left -= 1
        world = self.model.mesh.group(*AXES)
        comm.barrier(world)
        origin = time.perf_counter()
        recorder = Recorder(self.model.mesh.rank, self.model.device)
        self.model.runtime.observer = recorder
        try:
            yield
        finally:
            self.model.runtime.observer = Nobody()
        mine = [[e.lane, e.name, e.start, e.end, e.facts] for e in recorder.events]
        own = {"host": socket.gethostname(), "origin": origin, "events": mine, "microbatches": microbatches}
        everyone = comm.gather_json({**own, "pp": self.model.mesh.coordinate["pp"]}, world)
        if everyone is not None:
            trace = together(everyone, self.model.layout.table, number)
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"step_{number:08d}.json").write_text(json.dumps(trace), encoding="utf-8")


def together(everyone: Sequence[dict[str, Any]], table: Callable[[int], Schedule], number: int) -> dict[str, Any]:
    """The trace of a step from what each rank noted, with the prediction under the measured costs.

    `table`: of so many microbatches; pipelines side by side may have different numbers of them, and the longest counts.
    """
    shared = len({each["host"] for each in everyone}) == 1
    first = min(each["origin"] for each in everyone)
    measured = []
    for rank, each in enumerate(everyone):
        zero = first if shared else each["origin"]
        measured += [Event(rank, lane, name, a - zero, b - zero, f) for lane, name, a, b, f in each["events"]]
    tables = {n: table(n) for n in sorted({each["microbatches"] for each in everyone} - {0})} or {1: table(1)}
    longest = tables[max(tables)]
    costs = measured_costs(measured, longest.stages, max(1, len(everyone) // len(longest.ranks)))
    reports = {n: simulate(each, costs) for n, each in tables.items()}
    report = reports[max(tables)]
    # the prediction begins with the first action that was measured
    began = min((e.start for e in measured if e.lane == COMPUTE), default=0.0)
    lines: dict[tuple[int, int], list[Event]] = {}
    for n, of_pipeline in reports.items():
        for event in predicted(of_pipeline):
            lines.setdefault((n, event.rank), []).append(event)
    shown = [
        Event(rank, e.lane, e.name, e.start + began, e.end + began, e.facts)
        for rank, each in enumerate(everyone)
        for e in lines.get((each["microbatches"], each["pp"]), [])
    ]
    took = max((e.end for e in measured if e.lane == COMPUTE), default=0.0) - began
    facts = {"step": number, "schedule": longest.name, "predicted_s": report.makespan, "measured_s": took}
    facts |= {"predicted_bubble": min(report.bubble), "measured_bubble": measured_bubble(measured)}
    facts["schedule_costs"] = microseconds(costs, longest.stages)
    return trace_file([*shown, *measured], 1e6, facts)


def microseconds(costs: Costs, stages: int) -> list[int]:
    """Costs as `--schedule-costs` takes them: four numbers for every stage."""
    forward, backward, weight, way = (costs.per_stage(f, stages) for f in ("forward", "backward", "weight", "transfer"))
    rows = zip(forward, backward, weight, way, strict=True)
    return [round(1e6 * t) for f, b, w, t in rows for t in (f, b - w, w, t)]


def measured_bubble(events: Sequence[Event]) -> float:
    """Idle over busy time of the rank with the least of it, from the first to the last action of all."""
    work = [e for e in events if e.lane == COMPUTE and not e.name.startswith("REDUCE")]
    if not work:
        return 0.0
    took = max(e.end for e in work) - min(e.start for e in work)
    busy = max(sum(e.end - e.start for e in work if e.rank == rank) for rank in {e.rank for e in work})
    return (took - busy) / busy


def measured_costs(events: Sequence[Event], stages: int, lines: int = 1) -> Costs:
    """Median times of every stage's actions, in seconds, and of its transfers as far as they were waited for.

    `lines`: pipelines side by side (tensor- and data-parallel ranks).
    """
    times: dict[tuple[str, int], list[float]] = {}
    deferred = {(e.rank, e.facts["stage"], e.facts["microbatch"]) for e in events if e.name[0] == "W"}
    for e in events:
        if e.lane == COMPUTE and not e.name.startswith("REDUCE"):
            split = (e.rank, e.facts["stage"], e.facts["microbatch"]) in deferred
            kind = "I" if e.name[0] == "B" and split else e.name[0]
            times.setdefault((kind, e.facts["stage"]), []).append(e.end - e.start)
    middle = {key: median(values) for key, values in times.items()}
    forward, backward, weight = [], [], []
    for s in range(stages):
        inputs, weights = middle.get(("I", s), 0.0), middle.get(("W", s), 0.0)
        forward.append(middle.get(("F", s), 0.0))
        backward.append(middle.get(("B", s), inputs + weights))
        weight.append(min(weights, backward[s]) if ("B", s) not in middle else max(backward[s] - inputs, 0.0))
        if ("I", s) not in middle:
            weight[s] = 0.0
    return Costs(forward, backward, weight, _ways(events, stages, lines))


def _ways(events: Sequence[Event], stages: int, lines: int) -> list[float]:
    """Shortest time over each boundary that somebody waited for; 0 where nobody did."""
    sent = {(e.rank % lines, e.name): e.start for e in events if e.lane == TRANSFERS and e.name.startswith("SEND")}
    ways: list[list[float]] = [[] for _ in range(stages)]
    for e in events:
        if e.lane != TRANSFERS or not e.name.startswith("RECV") or e.facts["waited_s"] <= 0:
            continue
        action = Action.parse(e.name)
        forward = action.kind is Kind.RECV_F
        boundary = action.stage - 1 if forward else action.stage
        kind, stage = (Kind.SEND_F, action.stage - 1) if forward else (Kind.SEND_B, action.stage + 1)
        start = sent.get((e.rank % lines, str(Action(kind, stage, action.microbatch))))
        if start is not None and e.end > max(start, e.start):
            ways[boundary].append(e.end - max(start, e.start))
    return [min(way, default=0.0) for way in ways]
