"""Pipeline stages that sleep instead of computing: the runtime's timing without the machine's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import Mesh
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.runtime import Runtime
from isotron.train.timeline import Recorder

Times = tuple[float, float, float]  # seconds of forward, input gradient and weight gradient


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Times, sink: GradSink) -> Tensor:
        ctx.times, ctx.sink = times, sink
        time.sleep(times[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.times[1])
        if ctx.sink.later is None:
            time.sleep(ctx.times[2])
        else:
            ctx.sink.later.append(lambda: time.sleep(ctx.times[2]))
        return dy, None, None


class SleepyModule(nn.Module):
    """One stage: its input, a nap, and on the last stage a loss."""

    def __init__(self, first: bool, last: bool, times: Times) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, 4))
        self.first, self.last, self.times = first, last, times
        self.sink = GradSink(torch.zeros(1))

    def forward(self, batch: Any, boundary: dict[str, Tensor], weight: float) -> tuple[Any, Any]:
        x = _Nap.apply(self.start * 1 if self.first else boundary["hidden"], self.times, self.sink)
        return ({}, {"loss": (x.sum(), weight)}) if self.last else ({"hidden": x}, {})


def stage(number: int, stages: int, times: Times) -> Any:
    """What the runtime needs of a stage."""
    module = SleepyModule(number == 0, number == stages - 1, times)
    flat = SimpleNamespace(watch=lambda last: None, start_reduce=lambda last: None)
    shapes = {"hidden": ((1, 4), torch.float32)}
    return SimpleNamespace(
        module=module,
        flat=flat,
        sinks=[module.sink],
        boundary_shapes=lambda batch, behind: shapes,
        settle=lambda: None,
    )


def run_step(name: str, p: int, m: int, v: int, times: Times) -> list[list[Any]]:
    """On one of p ranks: the events of a step as [rank, lane, name, start, end, facts]."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    group = Mesh(rank, pp=p).group("pp")
    table = plan(name, p, m, v)
    own = {s: stage(s, table.stages, times) for s in table.stages_of(rank)}
    runtime = Runtime(own, group, overlap=False)
    batches: Any = [SimpleNamespace(shape=(1, 4), tokens=torch.zeros(1, 4)) for _ in range(m)]
    for each in own.values():  # once without naps: the first transfers open connections
        each.module.times = (0.0, 0.0, 0.0)
    runtime.run(table, batches, 1.0)
    for each in own.values():
        each.module.times = times
    comm.barrier(group)
    recorder = Recorder(rank, torch.device("cpu"))
    runtime.observer = recorder
    runtime.run(table, batches, 1.0)
    return [[e.rank, e.lane, e.name, e.start, e.end, e.facts] for e in recorder.events]
