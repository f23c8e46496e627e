"""Any module's parameters in the flat buffers that our own models use: sharded, reduced and gathered the same way.

Gradients come from autograd; a hook moves each into its wide buffer as soon as it is complete, so that reductions
overlap with the backward. A step is `begin`, `backward` per microbatch (the last one marked), `finish`, `send`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.errors import refuse
from isotron.core.layout import Box, Placed, Rule, shard
from isotron.core.mesh import ALONE, Group
from isotron.core.parallel.buckets import DENSE, Classes
from isotron.core.parallel.data import Flat, Partial
from isotron.core.parallel.shards import Sharding, Sharing


class Held:
    """`module` in place, its floating-point parameters and buffers cast to `dtype`, as on rank 0 of `group`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, zero: int, group: Group, bucket_size: int) -> None:
        if zero > 2:
            raise refuse(f"an engine with stage {zero}", "an engine shards optimizer state and gradients", "stage 2")
        module.to(dtype)
        self.module, self.dtype, self.group = module, dtype, group
        self.parameters = dict(module.named_parameters())
        if not any(p.requires_grad for p in self.parameters.values()):
            raise refuse("an engine for this module", "none of its parameters requires a gradient", "a module to train")
        for tensor in (*(p.data for p in self.parameters.values()), *module.buffers()):
            comm.broadcast(tensor, group)
        first = {name: p.data.view(p.shape or 1) for name, p in self.parameters.items()}  # a scalar is a row of one
        one = {"tp": 0}, {"tp": 1}
        rules = {name: Rule(name, tuple(t.shape)) for name, t in first.items()}
        self.placed = {name: Placed(name, rule, shard(rule, *one)) for name, rule in rules.items()}
        frozen = tuple(name for name, p in self.parameters.items() if not p.requires_grad)
        sharing = Sharing(group, ALONE) if zero else Sharing(ALONE, group)
        plan = Sharding(zero, {DENSE: sharing}, bucket_size, Classes(frozen=frozen))
        shapes = {id(p): p.shape for p in self.parameters.values()}
        device = next(iter(first.values())).device
        self.flat = Flat(self.parameters, self.placed, plan, dtype, device, _from(first), Partial(), None)
        self.device, self._streams = device, any(b.streams for b in self.flat.buckets)
        for p in self.parameters.values():
            p.data = p.data if shapes[id(p)] else p.data.view(())
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_deliver)

    def begin(self) -> None:
        """A new step."""
        self.flat.begin()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Gradients of one microbatch's loss, added up; after the last one they are being reduced."""
        if last:
            self.flat.watch()
        loss.backward()  # type: ignore[no-untyped-call]
        self.reduce(last)

    def reduce(self, last: bool) -> None:
        """A backward is over: what no gradient has completed is reduced too."""
        if last or self._streams:
            self.flat.start_reduce()

    def finish(self) -> None:
        """Every gradient is summed over the ranks at its owner."""
        self.flat.finish_reduce()

    def send(self) -> None:
        """Stepped weights to all ranks."""
        self.flat.start_gather(overlap=False)


def _deliver(p: Tensor) -> None:
    grad, p.grad = p.grad, None
    if grad is not None:
        p.grad_sink.add(grad)  # type: ignore[attr-defined]


def _from(first: dict[str, Tensor]) -> Callable[[Placed, Box, Tensor], None]:
    def fill(placed: Placed, box: Box, out: Tensor) -> None:
        out.copy_(first[placed.name][box.slices()])

    return fill
