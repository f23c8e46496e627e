"""Measured bubbles and step times of the pipeline schedules, beside the simulated ones, with stages that sleep.

    python benchmarks/pipeline_bubble.py [NAME ...] [--pp 4] [--microbatches 8] [--unit 0.2] [--rounds 1] [--json]

Every stage sleeps `unit` seconds (divided by its stages per rank) forward, for the input gradient and for the weight
gradient, so that processes need no cores. Quoted is the quickest of the rounds, beside the simulated bubble with free
transfers and the one under the costs that the round showed, its transfers too. Waking a process and handing over a
tensor take 1 to 5 ms each on a machine with fewer cores than ranks, so units must be long beside that.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from isotron.core.parallel.pipeline.events import LANES, Event
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.pipeline.simulate import simulate
from isotron.pool import close_all, run_ranks
from isotron.train.timeline import measured_bubble, measured_costs
from tests import sleepy


def measure(name: str, p: int, m: int, v: int, unit: float, rounds: int) -> tuple[float, float, float]:
    """(seconds, bubble, simulated bubble under the measured costs) of the quickest round."""
    times = (unit / v,) * 3
    found = []
    for _ in range(rounds):
        events = [Event(*e) for rank in run_ranks(p, sleepy.run_step, name, p, m, v, times) for e in rank]
        work = [e for e in events if e.lane == LANES[2]]
        own = min(simulate(plan(name, p, m, v), measured_costs(events, p * v)).bubble)
        found.append((max(e.end for e in work) - min(e.start for e in work), measured_bubble(events), own))
    return min(found)


def main() -> int:
    """Measure every schedule and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", choices=[*SCHEDULES, []], metavar="NAME", help="all without names")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    p, m, unit = given.pp, given.microbatches, given.unit
    rows = []
    for name in given.schedules or SCHEDULES:
        entry = SCHEDULES[name]
        v = 1 if entry.per_rank == "one" else 2
        report = simulate(plan(name, p, m, v))
        seconds, bubble, own = measure(name, p, m, v, unit, given.rounds)
        wanted = report.makespan * unit / v
        row = {"schedule": name, "measured_s": seconds, "simulated_s": wanted}
        rows.append(
            row | {"measured_bubble": bubble, "simulated_bubble": max(report.bubble), "under_measured_costs": own}
        )
        if not given.json:
            figures = f"bubble {bubble:6.1%} of {max(report.bubble):6.1%}, {own:6.1%} under measured costs"
            print(f"{name:<14} {seconds:7.3f} s of {wanted:7.3f}   {figures}")
    close_all()
    if given.json:
        print(json.dumps({"pp": p, "microbatches": m, "unit_s": unit, "schedules": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
