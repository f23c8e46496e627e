"""Tensor and sequence parallelism: what fills the sockets of plain layers.

Legend: S is dimension 1 of every activation. Each policy is a socket of `nn/linear.py`: `forward` and `backward` start
a communication and return something to wait for.

| policy    | forward           | backward          | where                                            |
|-----------|-------------------|-------------------|--------------------------------------------------|
| Copy      | nothing           | sum               | input of a layer split by outputs                |
| Gather    | gather S          | sum, scatter S    | the same under sequence parallelism              |
| Sum       | sum               | nothing           | output of a layer split by inputs                |
| Scatter   | sum, scatter S    | gather S          | the same under sequence parallelism              |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.layout import Placed
from isotron.core.mesh import Group
from isotron.core.nn.attention import Attention
from isotron.core.nn.cross import CrossAttention
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding, Positions
from isotron.core.nn.linear import Linear
from isotron.core.nn.loss import Head
from isotron.core.nn.mla import LatentAttention
from isotron.core.nn.norm import RMSNorm


@dataclass(frozen=True)
class Copy:
    """Identity; the input gradient is summed."""

    group: Group

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.done(x)

    def backward(self, dx: Tensor) -> comm.Pending:
        return comm.start_all_reduce(dx, self.group)


@dataclass(frozen=True)
class Gather:
    """The whole sequence from its parts; the input gradient is summed and cut."""

    group: Group

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.start_all_gather(x, self.group, 1)

    def backward(self, dx: Tensor) -> comm.Pending:
        return comm.start_reduce_scatter(dx, self.group, 1)


@dataclass(frozen=True)
class Sum:
    """The sum of the ranks' parts."""

    group: Group

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.start_all_reduce(x, self.group)

    def backward(self, dx: Tensor) -> comm.Pending:
        return comm.done(dx)


@dataclass(frozen=True)
class Scatter:
    """The own part of the sequence of the sum."""

    group: Group

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.start_reduce_scatter(x, self.group, 1)

    def backward(self, dx: Tensor) -> comm.Pending:
        return comm.start_all_gather(dx, self.group, 1)


@dataclass(frozen=True)
class SplitVocab:
    """The vocabulary socket of the loss."""

    group: Group
    first: int

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]."""
        return comm.all_gather(x[None], self.group, 0)


@dataclass(frozen=True)
class AcrossHeads:
    """The socket of a norm over all heads."""

    group: Group
    replicas: int

    def total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x."""
        return comm.all_reduce(x, self.group)


def fill_sockets(module: nn.Module, placed: dict[str, Placed], group: Group, sequence_parallel: bool) -> None:
    """Give every layer of a stage the policies that its weight's placement asks for. `placed` is keyed by local
    name.
    """
    split_up = group.size > 1
    enter = (Gather(group) if sequence_parallel else Copy(group)) if split_up else None
    leave = (Scatter(group) if sequence_parallel else Sum(group)) if split_up else None
    part = (group.index, group.size) if sequence_parallel else (0, 1)
    for name, layer in module.named_modules():
        here = placed.get(f"{name}.weight")
        split = here.rule.split.dim if here is not None and here.rule.split is not None else None
        match layer:
            case Linear() if split == 0:
                layer.enter = enter
            case Linear() if split == 1:
                layer.leave = leave
            case RMSNorm() if split == 0 and here is not None and split_up:
                layer.across = AcrossHeads(group, here.shard.replicas[0][1])
            case Embedding() if split == 0:
                layer.leave, (layer.first, layer.real) = leave, _held_rows(here)
            case Head() if split == 0:
                first, layer.real = _held_rows(here)
                layer.enter = enter
                layer.vocab = SplitVocab(group, first) if split_up else None
            case Positions():
                layer.sequence = part
            case Attention() | LatentAttention() | CrossAttention():
                layer.core.dropout.heads = (group.index, group.size)
            case Dropout():
                layer.sequence = part


def _held_rows(placed: Placed | None) -> tuple[int, int]:
    """(first global row, real rows) of a vocabulary shard; a shard of padding starts past every id."""
    if placed is None or not placed.shard.pieces:
        return torch.iinfo(torch.int32).max, 0
    (piece,) = placed.shard.pieces
    return piece.global_box.offset[0], piece.global_box.shape[0]
