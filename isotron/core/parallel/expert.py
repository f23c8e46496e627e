"""What fills the sockets of blocks with experts: how tokens meet experts of other ranks, and how ranks share sequences.

The ranks of a stage have an expert view (etp, ep, edp) beside the dense one (`mesh.py`). The `etp x ep` ranks of one
expert group hold all experts of a block between them, and each rank has tokens of its own:

| tp x sequence parallel | experts                 | tokens                                                            |
|------------------------|-------------------------|-------------------------------------------------------------------|
| 1, or split            | held whole by each rank | stay                                                              |
| split                  | cut over the same ranks | are gathered, and the ranks' parts added up (allgather)           |
| split                  | elsewhere               | are sent (alltoall) or gathered (allgather)                       |
| not split              | cut over the same ranks | are there already; the ranks' parts are added up                  |
| not split              | elsewhere               | each tensor-parallel rank takes its share, then as above (Shared) |

Routing weights travel beside the tokens, so that their gradients, of which every rank finds a part, come back by the
same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import Group, Mesh
from isotron.core.nn.dispatch import Dispatcher, Local
from isotron.core.nn.moe import MoE
from isotron.core.nn.router import Router
from isotron.core.parallel.all_to_all import AllToAll
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.shared_tokens import Shared
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


def dispatcher_of(experts: int, layout: Layout, mesh: Mesh) -> Dispatcher:
    """How the tokens of this rank meet `experts` experts of a block."""
    tp, group, ep = mesh.group("tp"), mesh.group("etp", "ep"), mesh.sizes["ep"]
    each = experts // ep
    held = range(mesh.coordinate["ep"] * each, (mesh.coordinate["ep"] + 1) * each)
    split, same = layout.sequence_parallel and tp.size > 1, group.ranks == tp.ranks
    gather = layout.moe_token_dispatcher_type == "allgather" or (ep == 1 and same)
    if gather and same and not split:
        return Local(Copy(tp), Sum(tp), held) if tp.size > 1 else Local()
    sequences = len({rank // tp.size for rank in group.ranks})
    inner: Dispatcher
    if group.size == 1:
        inner = Local()
    elif gather:
        inner = Local(Gather(group), Scatter(group), held, sequences)
    else:
        inner = AllToAll(group, mesh.sizes["etp"], held, sequences)
    return inner if split or tp.size == 1 else Shared(inner, tp)


def fill_experts(module: nn.Module, layout: Layout, mesh: Mesh) -> None:
    """Give the blocks with experts of a stage their dispatchers, and their routers the ranks that share sequences."""
    tp, split = mesh.group("tp"), layout.sequence_parallel and layout.tp > 1
    axes = (("tp",) if split else ()) + ("cp",)
    everyone = mesh.group_of(mesh.ranks_along(*axes))
    within = tp if split else mesh.group_of((mesh.rank,))
    for layer in module.modules():
        if isinstance(layer, MoE):
            layer.dispatcher = dispatcher_of(layer.router.cfg.num_experts, layout, mesh)
            if layout.overlap_moe_expert_parallel_comm:
                layer.set_halves()
            layer.experts.first = mesh.coordinate["etp"] * (layer.experts.hidden // mesh.sizes["etp"])
        if isinstance(layer, Router) and everyone.size > 1:
            layer.sequence = SplitSequence(within, everyone)
