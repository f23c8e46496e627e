"""Deliberate mistakes, to see that the check notices them: `verify --inject NAME` must fail and name the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.errors import refuse
from isotron.core.mesh import ALONE
from isotron.core.nn.linear import Linear, Socket, Wait
from isotron.core.parallel.data import Flat
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.shards import Bucket

INJECTIONS = ("drop-allreduce", "double-bias")


@contextmanager
def injected(fault: str, model: ParallelModel) -> Iterator[None]:
    """Train with one mistake: a gradient sum left out, or the bias of every row-split layer added on every rank."""
    if fault == "drop-allreduce":
        with _dropped_sum(model):
            yield
    elif fault == "double-bias":
        _double_biases(model)
        yield
    elif fault:
        raise refuse(f"--inject {fault}", f"the mistakes are {', '.join(INJECTIONS)}", f"--inject {INJECTIONS[0]}")
    else:
        yield


@contextmanager
def _dropped_sum(model: ParallelModel) -> Iterator[None]:
    """Leave out one gradient sum that the layout needs; which one depends on the layout alone, so all ranks agree."""
    layout, cfg = model.layout, model.config
    if layout.tp > 1 and (layout.sequence_parallel or cfg.kv_heads < layout.tp):
        with patch.object(Flat, "_sum_partial", lambda self: None):
            yield
    elif layout.placement[0] != layout.placement[-1] and cfg.tie_embeddings:
        with ExitStack() as stack:
            for stage in model.stages.values():
                stack.enter_context(patch.object(stage.flat, "ties", dict.fromkeys(stage.flat.ties, ALONE)))
            yield
    elif layout.dp > 1:
        with _without_first_bucket(model):
            yield
    elif layout.tp > 1:
        for stage in model.stages.values():
            for layer in stage.module.modules():
                if isinstance(layer, Linear) and layer.enter is not None:
                    layer.enter = replace(layer.enter, group=ALONE)  # type: ignore[type-var]
        yield
    else:
        raise refuse(
            "--inject drop-allreduce", "this layout sums no gradients over ranks, so none can be left out", "--tp 2"
        )


@contextmanager
def _without_first_bucket(model: ParallelModel) -> Iterator[None]:
    """Every bucket but a stage's first is reduced."""
    real_shards, real_copies = Bucket.sum_shards, Bucket.sum_copies
    first = {id(stage.flat.buckets[0]) for stage in model.stages.values()}

    def shards(bucket: Bucket, full: Tensor, add: bool) -> comm.Pending:
        if id(bucket) not in first:
            return real_shards(bucket, full, add)
        bucket.own_total.copy_(full[bucket.run] + (bucket.own_total if add else 0))
        return comm.done(bucket.own_total)

    def copies(bucket: Bucket) -> comm.Pending:
        return comm.done(bucket.own_total) if id(bucket) in first else real_copies(bucket)

    with patch.object(Bucket, "sum_shards", shards), patch.object(Bucket, "sum_copies", copies):
        yield


@dataclass(frozen=True)
class _Biased:
    """A row-split layer's way out with the bias already in each rank's part."""

    leave: Socket
    bias: Tensor

    def forward(self, x: Tensor) -> Wait:
        return self.leave.forward(x + self.bias.detach())

    def backward(self, dx: Tensor) -> Wait:
        return self.leave.backward(dx)


def _double_biases(model: ParallelModel) -> None:
    found = 0
    for stage in model.stages.values():
        for layer in stage.module.modules():
            if isinstance(layer, Linear) and layer.leave is not None and layer.bias is not None:
                layer.leave = _Biased(layer.leave, layer.bias)
                found += 1
    found = int(comm.all_reduce(torch.tensor(found, device=model.device), model.mesh.group("tp", "cp", "dp", "pp")))
    if not found:
        raise refuse(
            "--inject double-bias",
            "no layer of this model and layout has a bias beside a sum over ranks",
            "a model with biases (GPT) and --tp 2",
        )
