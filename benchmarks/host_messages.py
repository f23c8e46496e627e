"""Collectives between processes of one machine: in its memory, and over gloo.

    python benchmarks/host_messages.py [--ranks 2 4 8] [--repeats 30]

Float64 numbers per rank; milliseconds of one call, the slowest rank's mean. Both ways take turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from isotron.core import comm
from isotron.core import shared_memory as shm
from isotron.core.mesh import Mesh
from isotron.launch import run_ranks

SIZES = (4, 1000, 50_000, 500_000)


def timed(count: int, repeats: int, memory: bool) -> list[float]:
    """Milliseconds of a sum, a gather, a scattered sum and a barrier."""
    torch.set_num_threads(1)
    os.environ[shm.OFF] = "0" if memory else "1"
    group = Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp")
    x, wide = torch.ones(count, dtype=torch.float64), torch.ones(count * group.size, dtype=torch.float64)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(x, group), lambda: comm.all_gather(x, group, 0),
        lambda: comm.reduce_scatter(wide, group, 0), lambda: comm.barrier(group),
    ]  # fmt: skip
    found = []
    for call in calls:
        for _ in range(3):
            call()
        comm.barrier(group)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        found.append((time.perf_counter() - started) / repeats * 1e3)
    return found


def main() -> None:
    """A line for each number of ranks and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    print("| ranks | numbers | sum: memory | gloo | gather: memory | gloo | reduce-scatter | gloo | barrier | gloo |")
    print("|" + "---|" * 10)
    for world in given.ranks:
        for count in SIZES:
            ways = [run_ranks(world, timed, count, given.repeats, memory, timeout=300.0) for memory in (True, False)]
            worst = [[max(rank[i] for rank in way) for i in range(4)] for way in ways]
            cells = [f"{ms:.2f}" for pair in zip(*worst, strict=True) for ms in pair]
            print(f"| {world} | {count:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
