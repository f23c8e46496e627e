"""Data parallelism: the weights and gradients of a stage in flat buffers, and where gradients meet.

One buffer of weights (model dtype) and one of gradients (float32 or wider) per stage; parameters and gradient sinks
are views. The buffers are cut into buckets, each bucket into one run per data-parallel rank, at row boundaries. Under
ZeRO-1 a run's gradients are summed at its owner, which steps it and sends its weights to the others; without it, all
ranks sum and step all.

Two kinds of parameters must be summed before that, on full gradients: those that each tensor-parallel rank saw only a
part of the activation for (norm gains under sequence parallelism, shared key/value heads), and tied embeddings that
live on two pipeline stages. They sit in buckets of their own, which wait for the end of the pipeline table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.layout import Box, Placed, rows
from isotron.core.mesh import Group
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.buckets import cut_buckets, lateness, partial_pieces


@dataclass
class Bucket:
    """Elements [start, stop) of the flat buffers, cut into runs; `late` buckets are reduced after the table."""

    start: int
    stop: int
    cuts: list[int]
    late: bool
    sinks: list[GradSink]
    waiting: set[int] = field(default_factory=set)
    reducing: comm.Pending | None = None
    gathering: comm.Pending | None = None


@dataclass(frozen=True)
class View:
    """Rows of one parameter that this rank steps: flat views of weights and gradients, and the rows' local box."""

    placed: Placed
    box: Box
    weight: Tensor
    grad: Tensor

    def pieces(self, flat: Tensor, owned: bool = True) -> Iterator[tuple[Box, Tensor]]:
        """(global box, tensor) of the pieces inside the view's rows of any flat tensor laid out like it."""
        shaped = flat.view(self.box.shape)
        for piece in self.placed.owned() if owned else self.placed.shard.pieces:
            part = piece.restricted(self.box)
            if part is not None:
                yield part.global_box, shaped[part.local_box.slices()]


class Flat:
    """A stage's parameters in flat buffers.

    `placed`: local parameter name -> Placed. `partial`: replicas -> group, for pieces to be summed over tensor-parallel
    neighbours. `tie`: the group of the two stages that hold a tied parameter, and its local name.
    """

    def __init__(
        self,
        module: nn.Module,
        placed: dict[str, Placed],
        dp: Group,
        sharded: bool,
        bucket_size: int,
        is_partial: Callable[[Placed, int], bool],
        partial_group: Callable[[int], Group],
        tie: tuple[str, Group] | None,
    ) -> None:
        self.dp, self.sharded = dp, sharded
        self.tie = tie
        self._partial_group = partial_group
        named = [n for n in reversed(list(module.named_parameters())) if n[0] in placed]  # not what another stage holds
        self._partial = partial_pieces(placed, is_partial)
        late = lateness(self._partial, tie[0] if tie else None)
        named.sort(key=lambda n: late.get(n[0], 0))
        total = sum(p.numel() for _, p in named)
        first = named[0][1] if named else torch.empty(0)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(total, dtype=wide, device=first.device)
        self.sinks: dict[str, GradSink] = {}
        self.placed = placed
        self._parameters = named
        self._spans: dict[str, tuple[int, torch.Size]] = {}
        at = 0
        for name, p in named:
            span = slice(at, at + p.numel())
            self.weights[span] = p.data.flatten()
            p.data = self.weights[span].view(p.shape)
            p.grad_sink = self.sinks[name] = GradSink(self.grads[span].view(p.shape))  # type: ignore[attr-defined]
            self._spans[name] = (at, p.shape)
            at += p.numel()
        self.buckets = self._cut(late, bucket_size)
        self._bucket_of = {id(s): b for b in self.buckets for s in b.sinks}
        self._wait_in_forward(module)

    def _cut(self, late: dict[str, int], bucket_size: int) -> list[Bucket]:
        shapes = {name: tuple(shape) for name, (_, shape) in self._spans.items()}
        return [
            Bucket(s.start, s.stop, list(s.cuts), s.late, [self.sinks[n] for n in s.names])
            for s in cut_buckets(shapes, late, bucket_size, self.dp.size)
        ]

    def _wait_in_forward(self, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            own = [f"{name}.{n}".lstrip(".") for n, _ in layer.named_parameters(recurse=False)]
            buckets = {id(b): b for b in (self._bucket_of[id(self.sinks[n])] for n in own if n in self.sinks)}
            if buckets:
                found = tuple(buckets.values())
                layer.register_forward_pre_hook(lambda *_, found=found: _wait_gather(found))

    # ---- gradients -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new step: nothing has been accumulated."""
        for sink in self.sinks.values():
            sink.fresh, sink.on_write = True, None
        for bucket in self.buckets:
            bucket.reducing, bucket.waiting = None, set()

    def watch(self) -> None:
        """The last microbatch's backward is about to run: reduce each bucket when its last gradient is written."""
        for bucket in self.buckets:
            if not bucket.late:
                bucket.waiting = {id(s) for s in bucket.sinks}
                for sink in bucket.sinks:
                    sink.on_write = self._on_write

    def _on_write(self, sink: GradSink) -> None:
        bucket = self._bucket_of[id(sink)]
        sink.on_write = None
        bucket.waiting.discard(id(sink))
        if not bucket.waiting:
            self._start(bucket)

    def start_reduce(self) -> None:
        """The stage's last gradient is there: start what has not started and need not wait for the table's end."""
        for bucket in self.buckets:
            if not bucket.late and bucket.reducing is None:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        for sink in bucket.sinks:
            sink.clear_if_fresh()
        if self.sharded:
            flat, cuts = self.grads[bucket.start : bucket.stop], [c - bucket.start for c in bucket.cuts]
            bucket.reducing = comm.start_reduce_flat(flat, cuts, self.dp)
        else:
            bucket.reducing = comm.start_all_reduce(self.grads[bucket.start : bucket.stop], self.dp)

    def finish_reduce(self) -> None:
        """After the table: the sums on full gradients, the late buckets, and the end of every reduction."""
        astray = [name for name, p in self._parameters if p.grad is not None]
        if astray:
            raise RuntimeError(f"gradients that went past their buffers: {', '.join(astray)}")
        self._sum_partial()
        if self.tie is not None:
            name, group = self.tie
            self.sinks[name].clear_if_fresh()
            comm.all_reduce(self.sinks[name].buffer, group)
        for bucket in self.buckets:
            if bucket.reducing is None:
                self._start(bucket)
        for bucket in self.buckets:
            if bucket.reducing is not None:
                bucket.reducing.wait()

    def _sum_partial(self) -> None:
        for replicas in sorted({r for _, _, r in self._partial}):
            views = []
            for name, box, count in self._partial:
                if count == replicas:
                    self.sinks[name].clear_if_fresh()
                    views.append(self.sinks[name].buffer[box.slices()])
            flat = torch.cat([v.reshape(-1) for v in views])
            comm.all_reduce(flat, self._partial_group(replicas))
            for view, total in zip(views, flat.split([v.numel() for v in views]), strict=True):
                view.copy_(total.view(view.shape))

    # ---- weights ---------------------------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """What this rank steps: its run of each bucket, parameter by parameter."""
        return [v for b in self.buckets for v in self._in_run(b, *self._run(b, self.sharded))]

    def saved_views(self) -> list[View]:
        """What this rank saves: runs as under ZeRO-1, so that data-parallel ranks share the writing."""
        return [v for b in self.buckets for v in self._in_run(b, *self._run(b, True))]

    def _run(self, bucket: Bucket, sharded: bool) -> tuple[int, int]:
        i = self.dp.index
        return (bucket.cuts[i], bucket.cuts[i + 1]) if sharded else (bucket.start, bucket.stop)

    def _in_run(self, bucket: Bucket, start: int, stop: int) -> Iterator[View]:
        for name, (at, shape) in self._spans.items():
            low, high = max(start, at), min(stop, at + prod(shape))
            if low < high and bucket.start <= at < bucket.stop:
                width = prod(shape[1:])
                box = rows(tuple(shape), (low - at) // width, (high - at) // width)
                yield View(self.placed[name], box, self.weights[low:high], self.grads[low:high])

    def start_gather(self, overlap: bool) -> None:
        """Send stepped weights to the other data-parallel ranks; the next forward waits where it needs them."""
        if not self.sharded:
            return
        for bucket in reversed(self.buckets):
            flat, cuts = self.weights[bucket.start : bucket.stop], [c - bucket.start for c in bucket.cuts]
            bucket.gathering = comm.start_gather_flat(flat, cuts, self.dp)
        if not overlap:
            self.wait_weights()

    def wait_weights(self) -> None:
        """Block until every weight is current."""
        _wait_gather(self.buckets)


def _wait_gather(buckets: tuple[Bucket, ...] | list[Bucket]) -> None:
    for bucket in buckets:
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None
