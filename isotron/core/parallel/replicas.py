"""Whether weights that several ranks hold are bitwise equal: replicated over TP or DP, and tied over pipeline
stages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import AXES
from isotron.core.parallel.model import ParallelModel

BLOCK = 1 << 20  # elements at a time: the numbers of a block are 64 bits wide


def fingerprint(x: Tensor) -> int:
    """A number that differs when a bit of x differs (with overwhelming likelihood), the same on any device."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    total = 0
    for block in x.contiguous().view(words).flatten().split(BLOCK):
        place = torch.arange(1, block.numel() + 1, device=x.device)
        mixed = (block.to(torch.int64) ^ (place * 0x9E3779B97F4A7C1)) * 0x2545F4914F6CDD1D  # wraps around, on purpose
        total = (total * 1_000_003 + int((mixed ^ (mixed >> 29)).sum())) % (1 << 61)
    return total


def unequal_replicas(model: ParallelModel) -> list[str]:
    """Names of parameters whose copies differ between ranks that hold them; the same answer on every rank."""
    model.wait_weights()
    world = model.mesh.group(*AXES)
    prints: dict[str, int] = {}
    for stage in model.stages.values():
        for view in stage.flat.held():
            for box, part in view.pieces(view.weight, owned=False):
                prints[f"{view.placed.name} at {box.offset}"] = fingerprint(part)
        for name in stage.buffers:
            prints[name] = fingerprint(stage.module.get_buffer(name))
    everyone = comm.gather_json(prints, world)
    differing: list[str] = []
    if everyone is not None:
        seen: dict[str, int] = {}
        differing = sorted({k for rank in everyone for k, v in rank.items() if seen.setdefault(k, v) != v})
    return list(comm.broadcast_json(differing, world))
