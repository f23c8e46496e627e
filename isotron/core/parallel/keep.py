"""How the input of a recomputed unit is kept: each tensor-parallel rank, which all hold the same, keeps its share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isotron.core import comm
from isotron.core.mesh import Group

Share = tuple[Tensor, torch.Size]


def shared_inputs(group: Group) -> AbstractContextManager[Any]:
    """A context in which what is saved for the backward is cut over the group, and gathered when it is needed."""
    if group.size == 1:
        return nullcontext()

    def pack(x: Tensor) -> Share:
        length = -(-x.numel() // group.size)
        flat = x.detach().reshape(-1)
        mine = flat[group.index * length : (group.index + 1) * length].clone()
        return torch.nn.functional.pad(mine, (0, length - mine.numel())), x.shape

    def unpack(share: Share) -> Tensor:
        mine, shape = share
        return comm.all_gather(mine, group, 0)[: shape.numel()].view(shape)

    return saved_tensors_hooks(pack, unpack)
