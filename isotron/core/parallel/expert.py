"""What fills the sockets of blocks with experts: where tokens meet their experts, and how ranks share sequences.

Without expert parallelism every rank holds all experts, each of them cut by width over tensor-parallel ranks: tokens
enter and leave as they do a layer that is split by outputs and inputs. Routing weights enter beside the tokens, so that
their gradients, of which every rank finds a part, are added up by the same policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import Group, Mesh
from isotron.core.nn.dispatch import Local
from isotron.core.nn.moe import MoE
from isotron.core.nn.router import Router
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.tensor import Copy, Gather, Scatter, Sum


@dataclass(frozen=True)
class SplitSequence:
    """The socket of a router whose ranks hold parts of the same sequences. `group`: those that cut dimension 1 in
    order; `everyone`: all that hold a part, context-parallel ranks too.
    """

    group: Group
    everyone: Group

    @property
    def index(self) -> int:
        """Which part this rank holds."""
        return self.group.index

    @property
    def size(self) -> int:
        """Parts of a sequence."""
        return self.everyone.size

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in a tensor of its own."""
        return comm.all_reduce(x.detach().clone(), self.everyone)

    def whole(self, x: Tensor) -> Tensor:
        """Every rank's part of dimension 1, in order."""
        return comm.all_gather(x.detach(), self.group, 1)

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of dimension 1."""
        return x.chunk(self.group.size, 1)[self.group.index]


def fill_experts(module: nn.Module, layout: Layout, mesh: Mesh) -> None:
    """Give the blocks with experts of a stage their dispatchers, and their routers the ranks that share sequences."""
    tp, split = mesh.group("tp"), layout.sequence_parallel and layout.tp > 1
    axes = (("tp",) if split else ()) + ("cp",)
    everyone = mesh.group_of(mesh.ranks_along(*axes))
    within = tp if split else mesh.group_of((mesh.rank,))
    for layer in module.modules():
        if isinstance(layer, MoE) and layout.tp > 1:
            layer.dispatcher = Local(Gather(tp), Scatter(tp)) if split else Local(Copy(tp), Sum(tp))
        if isinstance(layer, Router) and everyone.size > 1:
            layer.sequence = SplitSequence(within, everyone)
