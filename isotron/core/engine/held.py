"""What an engine holds: a sharded module, cast to the type that it trains in, with a step in four parts.

A step is `backward` per microbatch (the last one marked), `finish`, an update of `views`, `send`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.engine.shard import shard
from isotron.core.engine.wide import cast
from isotron.core.errors import refuse
from isotron.core.mesh import Group
from isotron.core.parallel.data import View


class Held:
    """`module` in place, cast to `dtype` where one is given, with the parameters and buffers of rank 0 of `group`.

    keep_float32: patterns of parameters that are not cast, nor what belongs to the same module. options: of `shard`.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        zero: int,
        group: Group,
        bucket_size: int,
        keep_float32: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if dtype is not None:
            cast(module, dtype, keep_float32)
        if not any(p.requires_grad for p in module.parameters()):
            raise refuse("an engine for this module", "none of its parameters requires a gradient", "a module to train")
        for buffer in module.buffers():
            comm.broadcast(buffer, group)
        self.module, self.group = module, group
        self.parameters = dict(module.named_parameters())
        first = next(p for p in self.parameters.values() if p.requires_grad)
        self.dtype, self.device = first.dtype if dtype is None else dtype, first.device
        self.sharded = shard(module, None, zero=zero, bucket_size=bucket_size, **options)

    def views(self) -> list[View]:
        """What this rank steps."""
        return self.sharded.views()

    def saved_views(self) -> list[View]:
        """What this rank saves."""
        return [v for flat in self.sharded.flats for v in flat.saved_views()]

    def kept_views(self) -> list[View]:
        """Every weight that this rank keeps between steps."""
        return [v for flat in self.sharded.flats for v in flat.held()]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Gradients of one microbatch's loss, added up; those of the last one are reduced as they come."""
        if last:
            self.sharded.last_backward()
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Every gradient is summed over the ranks at its owner."""
        self.sharded.finish()

    def send(self) -> None:
        """Stepped weights to all ranks that keep them; a new step begins."""
        self.sharded.send()

    def forget(self) -> None:
        """No gradients; a new step begins."""
        self.sharded.zero_grad()
