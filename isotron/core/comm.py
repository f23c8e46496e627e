"""Every communication of the system. Collectives over a `Group`; over a group of one rank each is the identity.

| function             | what it does                               | its gradient          | used by                  |
|----------------------|--------------------------------------------|-----------------------|--------------------------|
| all_reduce           | sum or max over ranks, in place            | identity (row output) | row linear, embedding    |
| all_gather           | concatenate along a dimension              | reduce_scatter        | column linear, loss      |
| reduce_scatter       | sum, keep own part of a dimension          | all_gather            | the same under SP        |
| reduce_flat          | sum runs of a flat buffer to their owners  | (gradients)           | data.py: ZeRO-1          |
| gather_flat          | owners' runs of a flat buffer to all       | (weights)             | data.py: ZeRO-1          |
| all_to_all           | uneven runs from each rank to each         | all_to_all back       | experts, optim/muon.py   |
| exchange             | one batch of sends and receives            | (boundaries)          | pipeline runtime         |
| gather_json, barrier | small facts, also broadcast_json           |                       | checkpoints, start       |

The gradients are wired where the operation is (parallel/tensor.py), because a linear layer starts the communication of
its input gradient before it computes its weight gradient. Everything that can be waited for returns a `Pending`.

gloo sums bfloat16 in bfloat16 and its reduce-scatter is slow; there, sums are built from an all-to-all and one
addition in float32. Its rings take a turn per rank, several milliseconds over four ranks or more: over more than two,
what is small goes to everybody at once and is summed in rank order. NCCL's own collectives are used on GPUs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isotron.core.mesh import Group

SMALL_BYTES = 2**18


class Meter:
    """Seconds that this process has spent waiting for others."""

    def __init__(self) -> None:
        self.seconds = 0.0


WAITED = Meter()


class Pending:
    """A communication under way; `wait()` completes it and returns its result."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._works, self._finish = works, finish

    def finished(self) -> bool:
        """Whether it is known to be over without waiting (gloo does not say before the wait)."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        """Block until done; the result."""
        if self._works:
            started = time.perf_counter()
            for work in self._works:
                work.wait()
            WAITED.seconds += time.perf_counter() - started
        return self._finish()


def done(x: Tensor) -> Pending:
    """A finished communication."""
    return Pending((), lambda: x)


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group.handle) == "gloo"


def _goes_at_once(x: Tensor, group: Group) -> bool:
    """Whether everybody's copies are quicker than a ring."""
    return group.size > 2 and x.nbytes <= SMALL_BYTES and _is_gloo(group)


def _everyones(x: Tensor, group: Group) -> tuple[Any, Tensor]:
    """A communication that brings [ranks, *x.shape]."""
    copies = x.expand(group.size, *x.shape).contiguous()
    received = torch.empty_like(copies)
    return dist.all_to_all_single(received, copies, group=group.handle, async_op=True), received


def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """Sum or max of `x` over the group, in place. 16-bit sums on gloo are formed in float32."""
    if group.size == 1:
        return done(x)
    if x.numel() > group.size and _goes_at_once(x, group):  # of fewer numbers a ring has few turns
        work, parts = _everyones(x, group)
        return Pending((work,), lambda: x.copy_(_sum_parts(parts) if op == "sum" else parts.amax(0)))
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    if x.dtype in (torch.bfloat16, torch.float16) and _is_gloo(group):
        wide = x.float()
        work = dist.all_reduce(wide, reduce_op, group.handle, async_op=True)
        return Pending((work,), lambda: x.copy_(wide))
    if not x.is_contiguous():
        flat = x.contiguous()
        work = dist.all_reduce(flat, reduce_op, group.handle, async_op=True)
        return Pending((work,), lambda: x.copy_(flat))
    return Pending((dist.all_reduce(x, reduce_op, group.handle, async_op=True),), lambda: x)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum or max of `x` over the group, in place."""
    return start_all_reduce(x, group, op).wait()


def start_all_gather(x: Tensor, group: Group, dim: int) -> Pending:
    """Concatenation of every rank's equal-shaped `x` along `dim`."""
    if group.size == 1:
        return done(x)
    if _goes_at_once(x, group):
        work, parts = _everyones(x, group)
        return Pending((work,), lambda: parts.movedim(0, dim).flatten(dim, dim + 1))
    out = x.new_empty((group.size, *x.shape))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(out.view(group.size * x.shape[0], *x.shape[1:]), x.contiguous(), group.handle, async_op=True)
    return Pending((work,), lambda: out.movedim(0, dim).flatten(dim, dim + 1))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenation of every rank's equal-shaped `x` along `dim`."""
    return start_all_gather(x, group, dim).wait()


def _sum_parts(parts: Tensor) -> Tensor:
    """Sum over dimension 0 in rank order, in float32 for 16-bit types."""
    kind = parts.dtype
    wide = torch.promote_types(kind, torch.float32) if kind.is_floating_point else kind
    total, own = parts[0].to(wide), parts.dtype != wide  # whether it is no view of what was received
    for part in parts[1:]:
        total, own = (total.add_(part) if own else total + part), True
    return total.to(parts.dtype)


def start_reduce_scatter(x: Tensor, group: Group, dim: int) -> Pending:
    """Sum of `x` over the group; each rank gets its equal part of `dim`."""
    if group.size == 1:
        return done(x)
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    received = torch.empty_like(parts)
    if _is_gloo(group):
        work = dist.all_to_all_single(received, parts, group=group.handle, async_op=True)
        return Pending((work,), lambda: _sum_parts(received))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = scatter(received[0], parts.flatten(0, 1), group=group.handle, async_op=True)
    return Pending((work,), lambda: received[0])


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum of `x` over the group; each rank gets its equal part of `dim`."""
    return start_reduce_scatter(x, group, dim).wait()


def start_reduce_flat(
    flat: Tensor, cuts: Sequence[int], group: Group, into: Tensor | None = None, add: bool = False
) -> Pending:
    """Sum a flat buffer over the group; rank i gets the sum of everybody's run [cuts[i], cuts[i+1]).

    It goes to the own run of the buffer, or replaces `into` (which may be wider), or is added to it. Runs may be uneven
    or empty. The sum is taken in rank order whatever the transport, so it is reproducible.
    """
    mine = flat[cuts[group.index] : cuts[group.index + 1]]
    target = mine if into is None else into
    if group.size == 1:
        return Pending((), lambda: _put_sum(mine[None], target, add)) if into is not None else done(mine)
    lengths = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    received = flat.new_empty((group.size, mine.numel()))
    work = dist.all_to_all_single(
        received.view(-1), flat, [mine.numel()] * group.size, lengths, group=group.handle, async_op=True
    )
    return Pending((work,), lambda: _put_sum(received, target, add))


def _put_sum(parts: Tensor, into: Tensor, add: bool) -> Tensor:
    """The sum of parts over dimension 0 in `into`."""
    if not into.numel():
        return into
    if add:
        return into.add_(torch.sum(parts, 0, dtype=into.dtype))
    return torch.sum(parts, 0, dtype=into.dtype, out=into)


def start_gather_flat(flat: Tensor, cuts: Sequence[int], group: Group) -> Pending:
    """Fill a flat buffer with every rank's run [cuts[i], cuts[i+1]), in place; runs may be uneven or empty."""
    if group.size == 1:
        return done(flat)
    runs = [flat[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    mine = runs[group.index]
    if flat.nbytes <= SMALL_BYTES and _is_gloo(group):  # one call costs less than two for each rank
        sends, receives = [mine.numel()] * group.size, [run.numel() for run in runs]
        work = dist.all_to_all_single(flat, mine.repeat(group.size), receives, sends, group=group.handle, async_op=True)
        return Pending((work,), lambda: flat)
    ops = []
    for step in range(1, group.size):
        to, of = (group.index + step) % group.size, (group.index - step) % group.size
        if mine.numel():
            ops.append(dist.P2POp(dist.isend, mine, group.ranks[to], group.handle))
        if runs[of].numel():
            ops.append(dist.P2POp(dist.irecv, runs[of], group.ranks[of], group.handle))
    return Pending(dist.batch_isend_irecv(ops) if ops else (), lambda: flat)


def start_all_to_all(flat: Tensor, sends: Sequence[int], receives: Sequence[int], group: Group) -> Pending:
    """Send the next `sends[i]` entries (of dimension 0) to rank i; what comes, `receives[i]` from rank i, in order."""
    if group.size == 1:
        return done(flat)
    out = flat.new_empty(sum(receives), *flat.shape[1:])
    work = dist.all_to_all_single(out, flat, list(receives), list(sends), group=group.handle, async_op=True)
    return Pending((work,), lambda: out)


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group
) -> list[Pending]:
    """Post sends to and receives from world ranks as one batch; a Pending for each send, then each receive."""
    tensors = [x for x, _ in (*sends, *receives)]
    works: list[Any]
    if _is_gloo(group):  # takes each by itself, and a batch of them costs twice the time
        works = [dist.isend(x, to, group.handle) for x, to in sends]
        works += [dist.irecv(x, of, group.handle) for x, of in receives]
    else:
        ops = [dist.P2POp(dist.isend, x, to, group.handle) for x, to in sends]
        ops += [dist.P2POp(dist.irecv, x, of, group.handle) for x, of in receives]
        works = dist.batch_isend_irecv(ops) if ops else []
        works = list(works) * len(ops) if len(works) != len(ops) else works  # a coalescing back end has one for all
    return [Pending((w,), partial(_itself, x)) for w, x in zip(works, tensors, strict=True)]


def _itself(x: Tensor) -> Tensor:
    return x


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """`x` of the group's rank `source`, in place."""
    if group.size > 1:
        dist.broadcast(x, group.ranks[source], group.handle)
    return x


def barrier(group: Group) -> None:
    """Wait for every rank."""
    if group.size > 1:
        dist.barrier(group.handle)


def gather_json(value: Any, group: Group) -> list[Any] | None:
    """On the first rank the JSON-able values of all ranks, elsewhere None."""
    if group.size == 1:
        return [value]
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, json.dumps(value), group=group.handle)
    return [json.loads(v) for v in found] if group.index == 0 else None


def broadcast_json(value: Any, group: Group) -> Any:
    """The first rank's JSON-able value on every rank."""
    if group.size == 1:
        return value
    box = [json.dumps(value) if group.index == 0 else None]
    dist.broadcast_object_list(box, src=group.ranks[0], group=group.handle)
    return json.loads(str(box[0]))
