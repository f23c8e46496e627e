"""Data parallelism: the weights and gradients of a stage in flat buffers, and where gradients meet.

One buffer of weights (model dtype) and one of gradients (float32 or wider, unless told) per stage, cut into buckets and
each bucket into runs, at row boundaries (`buckets.py`); what of a bucket stays here and what comes and goes is in
`shards.py`. A run's gradients are summed at its owner, which steps it.

Two kinds of gradients need another sum, of runs: those that each tensor-parallel rank saw only a part of the
activation for (norm gains under sequence parallelism, shared key/value heads), and parameters that live on several
pipeline stages (`ties.py`). Neighbours cut their buckets alike, so it does not matter that the runs were summed before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core import device as devices
from isotron.core.layout import Box, Placed
from isotron.core.mapped import Disk
from isotron.core.mesh import Group
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.buckets import Span, copies_share, cut_buckets, rows_between
from isotron.core.parallel.shards import Bucket, Sharding

Fill = Callable[[Placed, Box, Tensor], None]


@dataclass(frozen=True)
class View:
    """Rows of one parameter that this rank holds: flat views of weights and gradients, and the rows' local box.

    `trained`: False for frozen parameters, whose `grad` is empty. `counts`: whether this rank answers for the rows
    among the data-parallel ranks that step the same ones. `hosted`: the weights live in host memory. `hosted_grad`: the
    gradients do.
    """

    placed: Placed
    box: Box
    weight: Tensor
    grad: Tensor
    trained: bool = True
    counts: bool = True
    hosted: bool = False
    hosted_grad: bool = False

    @property
    def wide(self) -> torch.dtype:
        """The type of masters and of what an update computes in: float32 or wider, whatever gradients are kept in."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def pieces(self, flat: Tensor, owned: bool = True) -> Iterator[tuple[Box, Tensor]]:
        """(global box, tensor) of the pieces inside the view's rows of any flat tensor laid out like it."""
        shaped = flat.view(self.box.shape)
        for piece in self.placed.owned() if owned else self.placed.shard.pieces:
            part = piece.restricted(self.box)
            if part is not None:
                yield part.global_box, shaped[part.local_box.slices()]


@dataclass(frozen=True)
class Partial:
    """Pieces whose replicas over tensor-parallel neighbours each hold a part of the gradient: (local name, local box,
    replicas), and the group of a number of replicas.
    """

    pieces: Sequence[tuple[str, Box, int]] = ()
    group: Callable[[int], Group] | None = None


class Flat:
    """A stage's parameters in flat buffers.

    `parameters` and `placed`: local name -> parameter and where it belongs, in the order of the modules. `fill` writes
    the first values of rows of a parameter in place. `ties`: local names of parameters that live on several stages, and
    the group of those; `sum_ties` sums them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        placed: dict[str, Placed],
        plan: Sharding,
        dtype: torch.dtype,
        device: torch.device,
        fill: Fill,
        partial: Partial,
        ties: Mapping[str, Group],
    ) -> None:
        self.plan, self.placed, self.ties, self._partial = plan, placed, dict(ties), partial
        self._parameters, self.device = parameters, device
        self._disk: Disk | None = None
        self._shapes = {name: p.shard.shape for name, p in placed.items()}
        kinds = {name: plan.classes.of(name, p) for name, p in placed.items()}
        spans = cut_buckets(self._shapes, kinds, plan.bucket_size, plan.ways)
        trained = [s for s in spans if not s.kind.frozen]
        sums = [plan.held(s, plan.keeps_gradients(s)) for s in trained] + [(0, 0)] * (len(spans) - len(trained))
        kept = plan.sums if plan.sums is not None and dtype.itemsize < 4 else torch.promote_types(dtype, torch.float32)
        weights = self._allocate(spans, dtype, device)
        totals = self._make_sums(spans, [b - a for a, b in sums], kept, device)
        self.buckets: list[Bucket] = []
        self.sinks: dict[str, GradSink] = {}
        self.bucket_of: dict[int, Bucket] = {}  # by id of the parameter
        for span, held, total in zip(spans, weights, totals, strict=True):
            self.buckets.append(Bucket(span, plan, held, total, device, self._disk if self._is_away(span) else None))
            self._adopt(self.buckets[-1])  # one at a time: until then the memory of the whole bucket is there
        self._bucket_of_sink = {id(s): b for b in self.buckets for s in b.sinks}
        self._flying: deque[comm.Pending] = deque()
        self._complete: Callable[[Bucket], None] = self.start
        with torch.no_grad():
            for view in self.held():
                fill(view.placed, view.box, view.weight.view(view.box.shape))

    def _allocate(self, spans: Sequence[Span], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Memory for what stays of each bucket's weights: in `weights` on the device, or in `hosted` on the host or
        in a file.
        """
        runs = [self.plan.held(s, self.plan.keeps_weights(s)) for s in spans]
        away = [self._is_away(s) for s in spans]
        room = {
            side: sum(b - a for (a, b), far in zip(runs, away, strict=True) if far == side) for side in (False, True)
        }
        self.weights = torch.zeros(room[False], dtype=dtype, device=device)
        size = (room[True],)
        if self.plan.files and room[True]:
            self._disk = Disk(self.plan.files, room[True] * dtype.itemsize)
        self.hosted = devices.host_zeros(size, dtype, device) if self._disk is None else self._disk.zeros(size, dtype)
        found, used = [], {False: 0, True: 0}
        for (a, b), far in zip(runs, away, strict=True):
            found.append((self.hosted if far else self.weights)[used[far] : used[far] + b - a])
            used[far] += b - a
        return found

    def _make_sums(
        self, spans: Sequence[Span], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Memory for the gradients that stay of each bucket: in `grads` on the device, or in `hosted_grads`."""
        far = [self.plan.hosted_sums and not self.plan.keeps_gradients(s) for s in spans]
        here = [0 if away else size for size, away in zip(sizes, far, strict=True)]
        there = [size if away else 0 for size, away in zip(sizes, far, strict=True)]
        self.grads = torch.zeros(sum(here), dtype=dtype, device=device)
        self.hosted_grads = devices.host_zeros((sum(there),), dtype, device)
        both = zip(self.grads.split(here), self.hosted_grads.split(there), far, strict=True)
        return [host if away else own for own, host, away in both]

    def _is_away(self, span: Span) -> bool:
        return self.plan.hosted and not self.plan.keeps_weights(span)

    def _adopt(self, bucket: Bucket) -> None:
        """Make the bucket's parameters views of it, and give them sinks."""
        at = 0
        for name in bucket.span.names:
            p, shape = self._parameters[name], self._shapes[name]
            p.data = bucket.whole[at : at + prod(shape)].view(shape)
            self.bucket_of[id(p)] = bucket
            if bucket.trained:
                p.grad_sink = self.sinks[name] = bucket.add_sink(at, shape)  # type: ignore[attr-defined]
                self.sinks[name].times = getattr(p, "writes", 1)
            at += prod(shape)
        bucket.free()

    def wait_in_forward(self, module: nn.Module) -> None:
        """Let each layer wait for its own weights, where they are sent to all ranks after a step (ZeRO-1 and 2)."""
        for layer in module.modules():
            own = (self.bucket_of.get(id(p)) for p in layer.parameters(recurse=False))
            found = {id(b): b for b in own if b is not None and not b.lean and b.shard.size > 1}
            if found:
                buckets = tuple(found.values())
                layer.register_forward_pre_hook(lambda *_, buckets=buckets: _wait_all(buckets))

    # ---- gradients -------------------------------------------------------------------------------------------------

    def begin(self, complete: Callable[[Bucket], None] | None = None) -> None:
        """A new step: nothing has been accumulated. `complete`: nobody says when gradients are reduced that are not
        kept whole (ZeRO-2 and 3), so this is called with each bucket when it is complete, and calls `start`.
        """
        self._complete = complete or self.start
        for bucket in self.buckets:
            bucket.begin()
            self._unwatch(bucket)
            if bucket.streams and complete:
                self._watch(bucket)

    def watch(self, last: bool) -> None:
        """The last gradients before a `start_reduce` are about to be written: start each bucket at its last one.
        `last`: what is kept whole is complete then, too.
        """
        for bucket in self.buckets:
            if bucket.streams or last:
                self._watch(bucket)

    def _watch(self, bucket: Bucket) -> None:
        """Reduce when all its gradients are written; a tied one is written at both ends of a stage, and waits."""
        if not bucket.span.kind.tied:
            bucket.waiting = {id(s): s.times for s in bucket.sinks}
            for sink in bucket.sinks:
                sink.on_write = self._on_write

    def _on_write(self, sink: GradSink) -> None:
        bucket = self._bucket_of_sink[id(sink)]
        left = bucket.waiting.pop(id(sink), 1) - 1
        if left:
            bucket.waiting[id(sink)] = left
        if not bucket.waiting and (bucket.is_open or not bucket.streams):
            self._complete(bucket)

    def start_reduce(self, last: bool) -> None:
        """A REDUCE of the table: start what has not started and need not wait for the end of the step."""
        for bucket in self.buckets:
            due = bucket.is_open if bucket.streams else last and bucket.reducing is None and not bucket.span.kind.tied
            if bucket.trained and due:
                self.start(bucket)
            elif bucket.streams:
                self._unwatch(bucket)

    @staticmethod
    def _unwatch(bucket: Bucket) -> None:
        for sink in bucket.sinks:
            sink.on_write = None

    def start(self, bucket: Bucket) -> None:
        """Start to sum what a bucket has over the ranks; nothing counts as zero."""
        pending = bucket.reduce()
        self._unwatch(bucket)
        if not bucket.streams:
            bucket.reducing = pending
            for sink in bucket.sinks:
                sink.on_write = _came_late
            return
        self._flying.append(pending)
        self._land(1 if self.plan.overlap else 0)
        if self._complete != self.start:
            self._watch(bucket)

    def _land(self, left: int) -> None:
        """Wait until at most so many sums of microbatches are under way."""
        while len(self._flying) > left:
            self._flying.popleft().wait()

    def finish_reduce(self) -> None:
        """After the table: the end of every reduction, and the sums over neighbours."""
        astray = [name for name, p in self._parameters.items() if p.grad is not None]
        if astray:
            raise RuntimeError(f"gradients that went past their buffers: {', '.join(astray)}")
        trained = [b for b in self.buckets if b.trained]
        for bucket in trained:
            if bucket.is_open or (not bucket.streams and bucket.reducing is None):
                self.start(bucket)
        self._land(0)
        for pending in [bucket.finish() for bucket in trained]:
            if pending is not None:
                pending.wait()
        self._sum_partial()

    def _grads_of(self, name: str) -> list[tuple[Box, Tensor]]:
        """The rows of a parameter that this rank steps, and their gradients in the shape of the rows."""
        found = []
        for bucket in self.buckets:
            if name in bucket.span.names and bucket.trained:
                found += [
                    (v.box, v.grad.view(v.box.shape)) for n, v in self._between(bucket, self._run(bucket)) if n == name
                ]
        return found

    def sum_tie(self, name: str) -> None:
        """Sum the gradient of a parameter over the stages that hold it; all of them call it."""
        for _, grad in self._grads_of(name):
            grad.copy_(comm.all_reduce(grad.to(self.device), self.ties[name], once=True))

    def _sum_partial(self) -> None:
        for replicas in sorted({count for _, _, count in self._partial.pieces}):
            views = []
            for name, box, count in self._partial.pieces:
                for rows, grad in self._grads_of(name) if count == replicas else ():
                    common = box.overlap(rows)
                    if common is not None:
                        views.append(grad[common.relative_to(rows).slices()])
            if views and self._partial.group is not None:
                flat = torch.cat([v.reshape(-1) for v in views]).to(self.device)
                comm.all_reduce(flat, self._partial.group(replicas), once=True)
                for view, total in zip(views, flat.split([v.numel() for v in views]), strict=True):
                    view.copy_(total.view(view.shape))

    # ---- weights ---------------------------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """What this rank steps: its run of each bucket, parameter by parameter."""
        return [v for b in self.buckets if b.trained for _, v in self._between(b, self._run(b))]

    def held(self) -> list[View]:
        """Every weight that this rank keeps, frozen ones too; gradients only where they are kept as well."""
        whole = ((b, self._run(b) if b.lean else (b.start, b.stop)) for b in self.buckets)
        return [v for b, run in whole for _, v in self._between(b, run)]

    def saved_views(self) -> list[View]:
        """What this rank saves: copies of a run share the writing."""
        found = []
        for b in self.buckets:
            share = copies_share(b.span, self._shapes, self._run(b), b.copies.index, b.copies.size)
            found += [v for _, v in self._between(b, share)]
        return found

    @staticmethod
    def _run(bucket: Bucket) -> tuple[int, int]:
        return bucket.span.run(bucket.shard.index)

    def _between(self, bucket: Bucket, run: tuple[int, int]) -> Iterator[tuple[str, View]]:
        """(local name, rows) of elements of the stage's buffer that lie in a bucket."""
        at = run[0] - bucket.start
        for name, box in rows_between(bucket.span, self._shapes, *run):
            weight = _part(bucket.own if bucket.lean else bucket.whole, at, box.size, bucket.run.start * bucket.lean)
            grad = _part(bucket.total, at, box.size, bucket.run.start * bucket.streams)
            trained, first = bucket.trained, bucket.copies.index == 0
            away = bucket.hosted, bucket.hosted_sums
            yield name, View(self.placed[name], box, weight, grad, trained, first, *away)
            at += box.size

    def start_gather(self, overlap: bool) -> None:
        """Send stepped weights to the ranks that keep them; the next forward waits where it needs them."""
        if self._disk is not None:
            self._disk.leave()
        for bucket in reversed(self.buckets):
            if bucket.trained and not bucket.lean:
                bucket.send_weights()
        if not overlap:
            self.wait_weights()

    def wait_weights(self) -> None:
        """Block until every weight that is kept is current."""
        _wait_all(self.buckets)


def _part(flat: Tensor, at: int, size: int, begins: int) -> Tensor:
    """Elements [at, at + size) of a bucket, from a tensor that begins at element `begins` of it; empty if not there."""
    low, high = at - begins, at - begins + size
    return flat[low:high] if low >= 0 and high <= len(flat) else flat[:0]


def _wait_all(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.wait_weights()


def _came_late(sink: GradSink) -> None:
    shape, rule = tuple(sink.buffer.shape), "what adds to it more than once in a backward says so (`writes`)"
    raise RuntimeError(f"a gradient of shape {shape} came after its sum over data-parallel ranks had begun; {rule}")
