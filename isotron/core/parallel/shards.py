"""One bucket of parameters: what this rank keeps of it, and how weights are gathered and gradients reduced.

A bucket is cut into one run per rank of its shard group; the same run is held by every rank of the copies' group.
What is kept between steps is the one thing in which the settings of ZeRO differ:

| zero | weights | gradients | optimizer state |
|------|---------|-----------|-----------------|
| 0    | whole   | whole     | whole           |
| 1    | whole   | whole     | own run         |
| 2    | whole   | own run   | own run         |
| 3    | own run | own run   | own run         |

Zero 0 is a shard group of one rank whose copies are all data-parallel ranks. What is not kept exists for a moment:
weights while somebody uses them, a microbatch's gradients until they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.mapped import Disk
from isotron.core.mesh import Group
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.buckets import Classes, Span


@dataclass(frozen=True)
class Sharing:
    """The ranks over which a class of parameters is cut, and those that hold the same run as this one."""

    shard: Group
    copies: Group


def sharing(ranks: Sequence[int], rank: int, group_of: Callable[[Sequence[int]], Group], size: int) -> Sharing:
    """Cut over blocks of `size` neighbours among `ranks`, copied across the blocks."""
    block = list(ranks).index(rank) // size * size
    return Sharing(group_of(ranks[block : block + size]), group_of(ranks[list(ranks).index(rank) % size :: size]))


@dataclass(frozen=True)
class Sharding:
    """What is sharded, over whom. `groups`: class of parameters -> its ranks. `transport`: the type in which gradients
    travel, None for that of their sums. `overlap`: at most two buckets of gradients are under way, else one at a time.
    `hosted`: own runs of weights that are not kept whole live in host memory, or in a file of the directory `files`.
    `sums`: the type in which gradients of 16-bit weights add up, None for float32. `hosted_sums`: sums of gradients
    that are not kept whole live in host memory.
    """

    zero: int
    groups: Mapping[str, Sharing]
    bucket_size: int
    classes: Classes
    overlap: bool = True
    transport: torch.dtype | None = None
    hosted: bool = False
    sums: torch.dtype | None = None
    files: str = ""
    hosted_sums: bool = False

    @property
    def ways(self) -> dict[str, int]:
        """Ranks that share a bucket, by class."""
        return {name: group.shard.size for name, group in self.groups.items()}

    def keeps_weights(self, span: Span) -> bool:
        """Whether all weights of a bucket stay between uses."""
        return self.zero < 3 or self.groups[span.kind.group].shard.size == 1

    def keeps_gradients(self, span: Span) -> bool:
        """Whether all gradients of a bucket stay until the end of a step."""
        return self.zero < 2 or self.groups[span.kind.group].shard.size == 1

    def held(self, span: Span, whole: bool) -> tuple[int, int]:
        """Elements of the stage's buffer that stay here."""
        return (span.start, span.stop) if whole else span.run(self.groups[span.kind.group].shard.index)


class Bucket:
    """Weights and gradients of one bucket. `held`: its part of the buffer of weights; `total`: of gradients, empty for
    frozen parameters. Places in tensors are counted from the bucket's start. `disk`: the file that the own weights
    are in.
    """

    def __init__(
        self, span: Span, plan: Sharding, held: Tensor, total: Tensor, device: torch.device, disk: Disk | None = None
    ) -> None:
        self.span, self.plan, self.total, self.device, self.disk = span, plan, total, device, disk
        self.start, self.stop = span.start, span.stop
        self.shard, self.copies = plan.groups[span.kind.group].shard, plan.groups[span.kind.group].copies
        self.cuts = [c - span.start for c in span.cuts]
        self.lean, self.streams = not plan.keeps_weights(span), not plan.keeps_gradients(span)
        self.run = slice(self.cuts[self.shard.index], self.cuts[self.shard.index + 1])
        self.hosted = self.lean and plan.hosted
        self.hosted_sums = self.streams and plan.hosted_sums
        self.whole = torch.empty(span.stop - span.start, dtype=held.dtype, device=device) if self.lean else held
        self.own = held if self.lean else held[self.run]
        self.sinks: list[GradSink] = []
        self.waiting: dict[int, int] = {}  # id of a sink -> contributions that are missing
        self.users = 0
        self.gathering: comm.Pending | None = None
        self.reducing: comm.Pending | None = None
        self.summed = False  # the own run of `total` holds something of this step (ZeRO-2 and 3)
        self._open: Tensor | None = None

    # ---- weights ---------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Somebody will use the weights: start to gather them if they are not here."""
        self.users += 1
        if self.lean and self.users == 1:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
            self.send_weights()

    def release(self) -> None:
        """A user is done; after the last one the gathered weights are dropped."""
        self.users -= 1
        if self.lean and not self.users:
            self.wait_weights()
            self.free()

    def free(self) -> None:
        """Nothing is gathered: views of the whole keep their place, without memory."""
        if self.lean:
            self.whole.untyped_storage().resize_(0)

    def send_weights(self) -> None:
        """Start to fill the whole from everybody's run."""
        if self.lean:
            self.whole[self.run].copy_(self.own, non_blocking=True)
        if self.disk is not None:
            self.disk.leave(self.own)
        self.gathering = comm.start_gather_flat(self.whole, self.cuts, self.shard)

    def read_ahead(self) -> None:
        """The weights will be gathered soon: what of them is in a file begins to be read."""
        if self.disk is not None and not self.users:
            self.disk.fetch(self.own)

    def wait_weights(self) -> None:
        """Block until the whole is there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    # ---- gradients -------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> bool:
        """Whether it has gradients."""
        return not self.span.kind.frozen

    @property
    def own_total(self) -> Tensor:
        """The own run's sums of gradients."""
        return self.total if self.streams else self.total[self.run]

    @property
    def is_open(self) -> bool:
        """Whether there are gradients that wait to be reduced (ZeRO-2 and 3)."""
        return self._open is not None

    def add_sink(self, at: int, shape: torch.Size | tuple[int, ...]) -> GradSink:
        """The sink of the parameter whose elements begin at `at`."""
        span = slice(at, at + prod(shape))
        if self.streams:
            sink = GradSink(provide=lambda: self._opened()[span].view(shape))
        else:
            sink = GradSink(self.total[span].view(shape))
        self.sinks.append(sink)
        return sink

    def _opened(self) -> Tensor:
        if self._open is None:
            self._open = torch.empty(self.stop - self.start, dtype=self.total.dtype, device=self.device)
        return self._open

    def begin(self) -> None:
        """A new step: nothing has been summed."""
        self.summed, self.reducing, self._open = False, None, None
        for sink in self.sinks:
            sink.on_write, sink.fresh = None, True
            if self.streams:
                sink.close()

    def reduce(self) -> comm.Pending:
        """Start to sum over the ranks what has been accumulated; ZeRO-2 and 3 add it to the own run."""
        for sink in self.sinks:
            sink.clear_if_fresh()
        if self.streams:
            full, add = self._opened(), self.summed
            for sink in self.sinks:
                sink.close()
            self._open, self.summed = None, True
            return self.sum_shards(full, add)
        return self.sum_copies() if self.shard.size == 1 else self.sum_shards(self.total, False)

    def sum_shards(self, full: Tensor, add: bool) -> comm.Pending:
        """The own run of the sum over the shard group, into `own_total` or added to it."""
        narrow = self._narrow(full, self.shard)
        if not self.hosted_sums:
            return comm.start_reduce_flat(narrow, self.cuts, self.shard, self.own_total, add)
        found = torch.empty(len(self.total), dtype=self.total.dtype, device=self.device)
        pending = comm.start_reduce_flat(narrow, self.cuts, self.shard, found)

        def away() -> Tensor:
            here = pending.wait().to(self.total.device)
            return self.total.add_(here) if add else self.total.copy_(here)

        return comm.Pending((), away)

    def sum_copies(self) -> comm.Pending:
        """The own run summed over those that hold the same run."""
        total = self.own_total
        if self.copies.size == 1:
            return comm.done(total)
        narrow = self._narrow(total, self.copies).to(self.device)
        pending = comm.start_all_reduce(narrow, self.copies, once=True)
        return pending if narrow is total else comm.Pending((), lambda: total.copy_(pending.wait()))

    def finish(self) -> comm.Pending | None:
        """The sums over shards have arrived: start those over copies where they are still missing."""
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
        if self.streams and not self.summed:
            self.total.zero_()
        return None if self.shard.size == 1 and not self.streams else self.sum_copies()

    def _narrow(self, x: Tensor, group: Group) -> Tensor:
        """x in the type in which it travels over a group; in a group of one nothing travels."""
        return x if self.plan.transport is None or group.size == 1 else x.to(self.plan.transport)
