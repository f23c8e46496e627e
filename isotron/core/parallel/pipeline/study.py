"""One schedule, its table, its simulation and the figures that people compare. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any

from isotron.core.parallel.pipeline import library, registry
from isotron.core.parallel.pipeline.actions import Schedule
from isotron.core.parallel.pipeline.live import with_sums, with_weights
from isotron.core.parallel.pipeline.path import critical_path
from isotron.core.parallel.pipeline.search import Found, search, stage_costs
from isotron.core.parallel.pipeline.simulate import Costs, Report, Travel, simulate
from isotron.core.parallel.pipeline.tables import is_file

Sizes = tuple[str, int, int, int, int, float, tuple[float, ...]]


@dataclass(frozen=True)
class Study:
    """A schedule for p ranks, m microbatches and v stages per rank, simulated under `costs` of its stages."""

    asked: Sizes
    table: Schedule
    costs: Costs
    report: Report
    found: Found | None = field(default=None, repr=False)

    @property
    def p(self) -> int:
        """Pipeline ranks."""
        return len(self.table.ranks)

    @property
    def m(self) -> int:
        """Microbatches."""
        return self.table.microbatches

    @property
    def v(self) -> int:
        """Stages per rank."""
        return self.table.stages // self.p

    @property
    def work(self) -> float:
        """Busy time of a rank."""
        return max(sum(end - start for _, start, end in row) for row in self.report.spans)

    @property
    def bubble(self) -> float:
        """Idle over busy time of the busiest rank."""
        return (self.report.makespan - self.work) / self.work

    @property
    def kept(self) -> float:
        """Most activations of a rank, in microbatches of all its layers."""
        return max(self.report.peak) / self.v

    @property
    def unit(self) -> float:
        """Simulated time of what figures are counted in, which is the same for any number of stages per rank: the unit
        of the costs that were given, or the forward of all layers of a rank for one microbatch.
        """
        per_rank = bool(self.asked[6]) or self.found is not None
        return 1.0 if per_rank else float(self.v)

    @property
    def unit_name(self) -> str:
        """The unit in words."""
        return "the unit of the costs" if self.asked[6] else "forwards of all layers of a rank for one microbatch"

    @property
    def time(self) -> float:
        """Of a step, in `unit`."""
        return self.report.makespan / self.unit

    @property
    def waits(self) -> tuple[float, ...]:
        """For transfers alone, of every rank, in `unit`."""
        return tuple(time / self.unit for time in self.report.exposed)

    def sharded(self, gradients: float, weights: float) -> Study:
        """The same under ZeRO-2, or 3 if `weights` is not negative: what of a rank's stages, which all count as 1, may
        wait for a sum, and may stay gathered.
        """
        every = dict.fromkeys(range(self.table.stages), 1)
        table = with_sums(self.table, every, int(gradients))
        table = with_weights(table, every, int(weights)) if weights > 0 else table
        return replace(self, table=table, report=simulate(table, self.costs))

    def facts(self) -> dict[str, Any]:
        """The figures as JSON values."""
        path = critical_path(self.report)
        report, unit = self.report, self.unit
        return {
            "schedule": self.table.name,
            "pp": self.p,
            "vpp": self.v,
            "microbatches": self.m,
            "placement": list(self.table.placement),
            "unit": self.unit_name,
            "makespan": self.time,
            "makespan_grouped": report.makespan_grouped / unit,
            "bubble": self.bubble,
            "bubble_of_total": 1 - self.work / report.makespan,
            "idle": [time / unit for time in report.idle],
            "peak_activations": [peak / self.v for peak in report.peak],
            "exposed_transfers": list(self.waits),
            "critical_path": [str(link.action) for _, link in path],
            "gradients_waiting": list(report.waiting),
            "gradients_reduced": list(report.sums),
            "weights_gathered": list(report.gathers),
            "critical_path_transfers": sum(x.end - x.start for _, x in path if isinstance(x, Travel)) / unit,
        }


def study(
    name: str, p: int, m: int, v: int = 0, group: int = 0, memory: float = 0, costs: tuple[float, ...] = ()
) -> Study:
    """A schedule by name; v = 0 means what it needs: 1, or 2 where it has several stages per rank.

    `auto` searches all placements for `memory` (0: what 1f1b keeps). `interleaved` with v = 1 is 1f1b. Without `costs`
    a forward, an input gradient and a weight gradient take as long as each other; with them they are those of a whole
    rank. Times that differ in v, or in the schedule alone, can be compared: see `Study.unit`.
    """
    asked = name, p, m, v, group, memory, costs
    if name == "auto" and p > 1:
        found = search(p, m, library.costs_of(costs, p), memory or p)
        own = _own(library.costs_of(costs, p), found.table.stages // p)
        return Study(asked, found.table, own, simulate(found.table, own), found)
    if is_file(name):
        table = library.plan(name, p, m, v)
    else:
        per_rank = registry.SCHEDULES[registry.resolved(name, v)].per_rank
        v = v or {"one": 1, "two": 2, "several": 2}[per_rank]
        name = "1f1b" if v == 1 and per_rank == "several" else name
        table = library.plan(name, p, m, v, group)
    v = table.stages // p
    own = _own(library.costs_of(costs, p, v), v) if costs else Costs()
    return Study(asked, table, own, simulate(table, own))


def _own(costs: Costs, v: int) -> Costs:
    """Costs of the stages, in which a stage of average size keeps 1 per microbatch."""
    kept = costs.activation
    return replace(stage_costs(costs, v), activation=tuple(a * v for a in kept) if isinstance(kept, Sequence) else 1)


@dataclass(frozen=True)
class Target:
    """How many microbatches give a bubble: exactly, and what whole numbers near it give (multiples of a group)."""

    bubble: float
    exact: float
    near: tuple[tuple[int, float], ...]


def target(shown: Study, bubble: float) -> Target:
    """The microbatches at which `shown` has this bubble: its idle time does not grow with them, its work does."""
    per_microbatch = shown.work / shown.m
    exact = (shown.report.makespan - shown.work) / per_microbatch / bubble
    name, p, _, _, group, memory, costs = shown.asked
    unit = (group or p) if shown.table.name == "interleaved" else 1
    whole = sorted({unit * max(1, floor(exact / unit)), unit * max(1, ceil(exact / unit))})
    near = (
        tuple((m, study(name, p, m, shown.v, group, memory, costs).bubble) for m in whole) if not is_file(name) else ()
    )
    return Target(bubble, exact, near)
