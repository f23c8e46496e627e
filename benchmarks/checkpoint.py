"""Checkpoints: what a save costs a step, how long until it is on the disk, and loading, beside torch's own ways.

    python benchmarks/checkpoint.py [--gib 1.0] [--ranks 2] [--rounds 3] [--dir DIR]

The same sharded state (parameters and two moments in float32) is saved in one run by `torch.save` (one file per rank),
`dcp.save`, `dcp.async_save` (as it comes, and with kept staging in shared memory), and isotron, at once and in the
background. A step is a stretch of time in which the tensors are only read, then an update in place. Two kinds: the
stretch waits for a device (the host is idle, as when training on GPUs), or it computes on this process's cores.

`added`: what a step with a save takes beyond one without. `durable`: from the call until the checkpoint is complete
and synced. Medians over the rounds, slowest rank. Nothing is torn down between rounds; the page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from isotron.core.checkpoint.background import BackgroundSaver
from isotron.core.checkpoint.load import Source, Wanted, load_tensors
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.layout import Box
from isotron.core.mesh import Mesh
from isotron.launch import run_local
from isotron.train.state import GroupRanks

STRETCH_S = 0.5
TENSORS = 24


class State:
    """This rank's rows of `TENSORS` tensors, as DTensors and as isotron's pieces."""

    def __init__(self, gib: float, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        rows = int(gib * 2**30 / 4 / TENSORS / 1024 / world) * world
        self.shape = (rows, 1024)
        self.mine = rows // world
        self.tensors = {f"t{i}": torch.randn(self.mine, 1024) for i in range(TENSORS)}
        mesh = init_device_mesh("cpu", (world,))
        self.dtensors = {n: DTensor.from_local(t, mesh, [Shard(0)]) for n, t in self.tensors.items()}

    def saved(self) -> list[Saved]:
        box = Box((self.rank * self.mine, 0), (self.mine, 1024))
        return [Saved(n, t.dtype, self.shape, [(box, t)]) for n, t in self.tensors.items()]

    def update(self) -> None:
        for tensor in self.tensors.values():
            tensor.mul_(0.999)


def stretch(busy: bool, a: torch.Tensor, calls: int) -> None:
    """Forward and backward: tensors are only read."""
    if not busy:
        time.sleep(STRETCH_S)
        return
    for _ in range(calls):
        torch.mm(a, a)


def calls_for(a: torch.Tensor) -> int:
    torch.mm(a, a)
    started = time.perf_counter()
    for _ in range(5):
        torch.mm(a, a)
    return max(1, int(STRETCH_S / ((time.perf_counter() - started) / 5)))


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def step(state: State, busy: bool, a: torch.Tensor, calls: int, before: Callable[[], None]) -> None:
    stretch(busy, a, calls)
    before()
    state.update()


class Ways:
    """Each way: begin(directory) -> (wait before the update, wait until durable)."""

    def __init__(self, state: State) -> None:
        self.state, self.rank = state, state.rank
        mesh = Mesh(state.rank, dp=state.world)
        self.ranks, self.saver = GroupRanks(mesh.group("dp")), BackgroundSaver(GroupRanks(mesh.apart()))
        self.side = dist.new_group(backend="gloo")
        self.stagers: dict[str, Any] = {}
        self.count = 0

    def torch_save(self, place: Path) -> Any:
        file = place / f"{self.rank}.pt"
        with file.open("wb") as f:
            torch.save(self.state.tensors, f)  # as it comes: without a sync
        dist.barrier()
        return nothing, nothing

    def dcp_save(self, place: Path) -> Any:
        dcp.save(self.state.dtensors, checkpoint_id=place)
        return nothing, nothing

    def dcp_async(self, place: Path) -> Any:
        future = dcp.async_save(self.state.dtensors, checkpoint_id=place, process_group=self.side)
        return nothing, future.result

    def dcp_async_kept(self, place: Path) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if "kept" not in self.stagers:
            self.stagers["kept"] = DefaultStager(StagingOptions(False, True, False, False))
        future = dcp.async_save(
            self.state.dtensors, checkpoint_id=place, process_group=self.side, async_stager=self.stagers["kept"]
        )
        return nothing, getattr(future, "upload_completion", future).result

    def isotron(self, place: Path) -> Any:
        save_checkpoint(place, 1, self.state.saved(), {}, self.ranks)
        return nothing, nothing

    def isotron_background(self, place: Path) -> Any:
        self.count += 1
        self.saver.start(place, self.count, self.state.saved(), {})
        return self.saver.wait_staged, self.saver.wait


WAYS = ("torch_save", "dcp_save", "dcp_async", "dcp_async_kept", "isotron", "isotron_background")


def nothing() -> None:
    """Nobody to wait for."""


def timed(state: State, ways: Ways, way: str, place: Path, busy: bool, a: torch.Tensor, calls: int) -> dict[str, float]:
    """One save within a step: the step's time and the time until durable, slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    before, durable = getattr(ways, way)(place)
    called = time.perf_counter() - started
    step(state, busy, a, calls, before)
    whole = time.perf_counter() - started
    durable()
    until = time.perf_counter() - started
    return {"call": slowest(called), "step": slowest(whole), "durable": slowest(until)}


def one_round(
    state: State, ways: Ways, way: str, place: Path, busy: bool, a: torch.Tensor, calls: int
) -> dict[str, float]:
    """A step without a save, one with, and a save with nothing beside it."""
    _make(place, state.rank)
    started = time.perf_counter()
    step(state, busy, a, calls, nothing)
    bare = slowest(time.perf_counter() - started)
    found = timed(state, ways, way, place, busy, a, calls)
    found["added"] = found["step"] - bare
    found["alone"] = durable_alone(ways, way, _make(place / "alone", state.rank)) if not busy else 0.0
    dist.barrier()
    if state.rank == 0:
        shutil.rmtree(place)
    return found


def durable_alone(ways: Ways, way: str, place: Path) -> float:
    """From the call until durable, with nothing else to do: comparable with a save that is waited for."""
    dist.barrier()
    started = time.perf_counter()
    before, durable = getattr(ways, way)(place)
    before()
    durable()
    return slowest(time.perf_counter() - started)


def loading(state: State, home: Path) -> dict[str, float]:
    """Seconds to load this layout's part, and another layout's (split along columns)."""
    found: dict[str, float] = {}
    mesh, other = init_device_mesh("cpu", (state.world,)), 1024 // state.world
    for name, dim in (("same layout", 0), ("other layout", 1)):
        shape = (state.mine, 1024) if dim == 0 else (state.shape[0], other)
        box = Box((state.rank * state.mine, 0), shape) if dim == 0 else Box((0, state.rank * other), shape)
        for way in ("dcp", "isotron"):
            local = {n: torch.zeros(shape) for n in state.tensors}
            dist.barrier()
            started = time.perf_counter()
            if way == "dcp":
                wanted = {n: DTensor.from_local(t, mesh, [Shard(dim)]) for n, t in local.items()}
                dcp.load(wanted, checkpoint_id=home / "dcp")
            else:
                source = Source(home / "isotron" / "step_00000001")
                load_tensors(source, [Wanted(n, [(box, t)], state.shape) for n, t in local.items()])
                source.close()
            found[f"load {name}, {way}"] = slowest(time.perf_counter() - started)
            if dim == 0 and not all(torch.equal(local[n], t) for n, t in state.tensors.items()):
                raise RuntimeError(f"{way} loaded other values than were saved")
    return found


def main(gib: float, rounds: int, home: str) -> int:
    """One rank of the benchmark; rank 0 prints JSON."""
    from datetime import timedelta

    from isotron.launch import World, from_environment, init_distributed, shutdown

    world = from_environment() or World()
    if world.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=300))
    init_distributed(world, torch.device("cpu"))
    state = State(gib, world.rank, world.size)
    ways, a = Ways(state), torch.randn(512, 512)
    calls, results = calls_for(a), dict[str, Any]()
    root = Path(home)
    for busy in (False, True):
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way in WAYS:  # in turn, so that what else the machine does meets all alike
                found[way].append(one_round(state, ways, way, root / f"{way}-{turn}", busy, a, calls))
        for way, rows in found.items():  # the first round makes buffers
            medians = {k: statistics.median(row[k] for row in rows[1:]) for k in rows[0]}
            results[f"{'busy' if busy else 'idle'} host, {way}"] = medians
    dcp.save(state.dtensors, checkpoint_id=root / "dcp")
    save_checkpoint(root / "isotron", 1, state.saved(), {}, ways.ranks)
    turns = [loading(state, root) for _ in range(rounds)]
    results["load"] = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    if world.rank == 0:
        print(json.dumps(results))
        _report(results)
    shutdown()
    return 0


def _make(place: Path, rank: int) -> Path:
    """An empty directory, made by rank 0."""
    if rank == 0:
        place.mkdir()
    dist.barrier()
    return place


def _report(results: dict[str, Any]) -> None:
    print(f"\n{'':<34}{'added to a step':>18}{'durable':>10}{'durable, nothing else to do':>30}")
    for name, row in results.items():
        if name != "load":
            alone = f"{row['alone']:.3f} s" if row["alone"] else ""
            print(f"{name:<34}{1000 * row['added']:>15.0f} ms{row['durable']:>8.3f} s{alone:>30}")
    for name, seconds in results["load"].items():
        print(f"{name:<34}{seconds:>12.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where to write; default: the temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as home:
        raise SystemExit(run_local(f"{__file__}:main", args.ranks, (args.gib, args.rounds, home)))
