"""The only executor: runs this rank's row of a pipeline table, whatever schedule wrote it.

One process without a pipeline runs the one-stage table. Every maximal run of transfers is posted as one batch, and
nothing waits before a compute action needs the data. Of a forward only what its backward needs is kept: of the output
the edge of its graph, not its values, which are free as soon as they are sent; of a deferred weight gradient its two
factors, until it is computed. Reading order: `Runtime.run`, then the `_Pass` that holds one step's state.

Weight gradients wait for a W action where the table has one, but for those of norms, biases and embeddings, which are
formed in the B action.

A boundary is a set of named tensors, which may be another set behind every stage; those that are not of a floating type
have no gradient that travels back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isotron.core import comm
from isotron.core.autograd import backward_from
from isotron.core.batch import Batch
from isotron.core.mesh import Group
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule

Key = tuple[int, int]
KEPT_SENDS = 4  # sends not known to be over; each holds its tensor in memory


Boundary = dict[str, Tensor]


class Buffers(Protocol):
    """Where a stage's weight gradients go."""

    def watch(self, last: bool) -> None:
        """The last gradients before a `start_reduce` are about to be written. `last`: what is kept whole may start."""
        ...

    def start_reduce(self, last: bool) -> None:
        """The table reduces the stage's gradients. `last`: of the step."""
        ...


class Stage(Protocol):
    """What the runtime needs of a stage."""

    @property
    def module(self) -> Callable[[Batch, Boundary, float], tuple[Boundary, dict[str, tuple[Tensor, float]]]]:
        """(batch, boundary, weight) -> the next boundary and the terms of the loss."""
        ...

    @property
    def flat(self) -> Buffers:
        """Its gradients."""
        ...

    @property
    def sinks(self) -> Sequence[GradSink]:
        """Of the parameters that it uses, those of another stage of this rank too."""
        ...

    def boundary_shapes(self, batch: Batch, behind: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of what stage `behind`, this one or the one before, hands on of a batch."""
        ...

    def settle(self) -> None:
        """A forward or a backward of the stage is over."""
        ...

    def gather(self, wanted: bool) -> None:
        """Start to gather all weights and keep them, or let them go."""
        ...

    def recompute(self, wanted: bool) -> None:
        """Under full recompute: whether the next forward keeps only the inputs of its units."""
        ...


class Observer(Protocol):
    """Hears what the runtime does, when it does it."""

    def computed(self, action: Action) -> AbstractContextManager[None]:
        """Around every action but transfers."""
        ...

    def posted(self, actions: Sequence[Action]) -> None:
        """Transfers have been started."""
        ...

    def arrived(self, action: Action) -> AbstractContextManager[None]:
        """Around the wait for what a RECV started."""
        ...


class Nobody:
    """The observer of a run that is not traced."""

    def computed(self, action: Action) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def posted(self, actions: Sequence[Action]) -> None:
        """Nothing."""

    def arrived(self, action: Action) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


class Runtime:
    """Executes tables over the stages of this rank.

    `group`: the pipeline ranks. `overlap`: reduce buckets while the last backward goes on. `keep`: under full
    recompute, how many microbatches in flight per stage keep everything nevertheless; None: no full recompute.
    """

    def __init__(self, stages: Mapping[int, Stage], group: Group, overlap: bool, keep: int | None = None) -> None:
        self.stages, self.group, self.overlap, self.keep = stages, group, overlap, keep
        self.observer: Observer = Nobody()

    def run(self, schedule: Schedule, batches: Sequence[Batch], weight: float) -> dict[str, Tensor]:
        """Forward and, where the table says so, backward over all microbatches.

        `weight` is what a token's loss enters the backward with. Returns term name -> sum over this rank's tokens,
        float64 (nothing on ranks that hold no loss).
        """
        step = _Pass(self, schedule, batches, weight)
        for transfers, actions in groupby(schedule.ranks[self.group.index], key=lambda a: a.transfers):
            if transfers:
                step.transfer(list(actions))
            else:
                for action in actions:
                    for part in action.parts:
                        received = step.receive(part)
                        with self.observer.computed(part):
                            step.compute(part, received)
                        del received  # not to be kept until the next has come
        step.finish()
        return step.terms


class _Pass:
    """The state of one execution of a table."""

    def __init__(self, runtime: Runtime, schedule: Schedule, batches: Sequence[Batch], weight: float) -> None:
        self.runtime, self.schedule, self.batches, self.weight = runtime, schedule, batches, weight
        self.stages = runtime.stages
        self.last_stage = schedule.stages - 1
        self.inputs: dict[Key, dict[str, Tensor]] = {}
        self.outputs: dict[Key, dict[str, Tensor]] = {}  # values, until they are sent
        self.edges: dict[Key, dict[str, GradientEdge]] = {}  # where the backward of an output begins
        self.keeping: dict[int, set[int]] = {s: set() for s in runtime.stages}  # microbatches that keep everything
        self.losses: dict[Key, list[tuple[Tensor, float]]] = {}
        self.gradients: dict[Key, dict[str, Tensor]] = {}
        self.arriving: dict[tuple[Kind, int, int], dict[str, comm.Pending]] = {}
        self.leaving: deque[comm.Pending] = deque()
        self.later: dict[Key, list[Callable[[], None]]] = {}
        self.terms: dict[str, Tensor] = {}
        rank = runtime.group.index
        mine = [part for _, part in schedule.parts(rank)]
        self.deferred = {(a.stage, a.microbatch) for a in mine if a.kind is Kind.W}
        self.sums = Counter(a.stage for a in mine if a.kind is Kind.REDUCE)  # that are still to come
        self.watched = _last_writers(mine)
        self.training = any(a.kind is Kind.B for a in mine)

    # ---- compute ---------------------------------------------------------------------------------------------------

    def compute(self, action: Action, received: dict[str, Tensor]) -> None:
        """One F, B or W with what it has `received`, or what concerns the weights or the gradients of a stage."""
        if action.kind is Kind.REDUCE:
            self.sums[action.stage] -= 1
            self.stages[action.stage].flat.start_reduce(self.sums[action.stage] == 0)
            return
        if action.kind in (Kind.UNSHARD, Kind.RESHARD):
            self.stages[action.stage].gather(action.kind is Kind.UNSHARD)
            return
        key = (action.stage, int(action.microbatch or 0))
        if (action.kind, *key) in self.watched:
            # a W may write a weight several times (the output layer of further predictions), and must not start early
            last = self.sums[action.stage] == 1 and action.kind is Kind.B
            self.stages[action.stage].flat.watch(last and self.runtime.overlap)
        if action.kind is Kind.W:
            self.weight_gradient(*key)
        else:
            (self.forward if action.kind is Kind.F else self.backward)(*key, received)

    def receive(self, action: Action) -> dict[str, Tensor]:
        """Wait for what a compute action needs of another stage."""
        s, m = action.stage, int(action.microbatch or 0)
        if action.kind is Kind.F and s:
            return self._take(Kind.RECV_F, s, m)
        return self._take(Kind.RECV_B, s, m) if action.kind is Kind.B and s < self.last_stage else {}

    def forward(self, s: int, m: int, received: dict[str, Tensor]) -> None:
        """Output and terms of a stage; nothing is kept when the table has no backward."""
        if self.training:
            received = {k: v.requires_grad_(v.is_floating_point()) for k, v in received.items()}
            self._choose_recompute(s, m)
            for sink in self.stages[s].sinks:
                sink.defers = (s, m) in self.deferred
        with torch.set_grad_enabled(self.training):
            output, terms = self.stages[s].module(self.batches[m], received, self.weight)
        self.stages[s].settle()
        self._check_boundary(s, m, output)
        for name, (value, _) in terms.items():
            total = value.detach().double()
            self.terms[name] = self.terms[name] + total if name in self.terms else total
        if self.training:
            self.edges[s, m] = {k: get_gradient_edge(v) for k, v in output.items() if v.requires_grad}
            self.inputs[s, m] = received
            self.losses[s, m] = [(value, w) for value, w in terms.values() if value.requires_grad]
        if s < self.last_stage and self.schedule.placement[s + 1] == self.runtime.group.index:
            self._hand_over(Kind.RECV_F, s + 1, m, {k: v.detach() for k, v in output.items()})
        elif s < self.last_stage:
            self.outputs[s, m] = {k: v.detach() for k, v in output.items()}

    def _choose_recompute(self, s: int, m: int) -> None:
        """The first microbatches in flight keep everything, as many as the layout allows."""
        if self.runtime.keep is not None:
            wanted = len(self.keeping[s]) >= self.runtime.keep
            self.stages[s].recompute(wanted)
            if not wanted:
                self.keeping[s].add(m)

    def _check_boundary(self, s: int, m: int, output: Mapping[str, Tensor]) -> None:
        """What a stage hands on must be what the next one receives: names, shapes and types."""
        if s == self.last_stage:
            return
        agreed = self.stages[s].boundary_shapes(self.batches[m], s)
        found = {name: (tuple(t.shape), t.dtype) for name, t in output.items()}
        if found != agreed:
            raise RuntimeError(f"stage {s} hands on {found}, its neighbours agreed on {agreed}")

    def backward(self, s: int, m: int, received: dict[str, Tensor]) -> None:
        """Input gradient of a stage from the `received` gradient of its output, and its weight gradients unless the
        table has a W for them.
        """
        stage, key = self.stages[s], (s, m)
        if key in self.deferred:
            self._defer(stage, self.later.setdefault(key, []))
        edges, losses = self.edges.pop(key), self.losses.pop(key)
        losses = [(value, w) for value, w in losses if value.requires_grad]
        roots: list[Tensor | GradientEdge] = [*edges.values(), *(value for value, _ in losses)]
        grads = [*(received[k] for k in edges), *(torch.full_like(value, w) for value, w in losses)]
        if roots:  # nothing before the first trained parameter has a backward
            backward_from(roots, grads)
        stage.settle()
        self.keeping[s].discard(m)
        self._defer(stage, None)
        inputs = self.inputs.pop(key)
        inputs = {k: v for k, v in inputs.items() if v.is_floating_point()}
        found = {k: v.grad if v.grad is not None else torch.zeros_like(v) for k, v in inputs.items()}
        if s and self.schedule.placement[s - 1] == self.runtime.group.index:
            self._hand_over(Kind.RECV_B, s - 1, m, found)
        else:
            self.gradients[key] = found

    def weight_gradient(self, s: int, m: int) -> None:
        """The weight gradients that a backward put off; each one's factors are free when it is done."""
        waiting = self.later.pop((s, m))[::-1]
        while waiting:
            waiting.pop()()

    @staticmethod
    def _defer(stage: Stage, later: list[Callable[[], None]] | None) -> None:
        for sink in stage.sinks:
            sink.later = later

    # ---- transfers -------------------------------------------------------------------------------------------------

    def transfer(self, actions: list[Action]) -> None:
        """Post a run of sends and receives as one batch."""
        ranks, placement = self.runtime.group.ranks, self.schedule.placement
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        targets: list[tuple[tuple[Kind, int, int], str]] = []
        for action in actions:
            s, m = action.stage, int(action.microbatch or 0)
            toward = s + 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else s - 1
            peer = ranks[placement[toward]]
            if action.kind is Kind.SEND_F:
                sends += [(t.contiguous(), peer) for _, t in sorted(self.outputs.pop((s, m)).items())]
            elif action.kind is Kind.SEND_B:
                sends += [(t.contiguous(), peer) for _, t in sorted(self.gradients.pop((s, m)).items())]
            else:
                behind = s - 1 if action.kind is Kind.RECV_F else s
                for name, (shape, dtype) in sorted(self.stages[s].boundary_shapes(self.batches[m], behind).items()):
                    if action.kind is Kind.RECV_B and not dtype.is_floating_point:
                        continue
                    device = self.batches[m].tokens.device
                    receives.append((torch.empty(shape, dtype=dtype, device=device), peer))
                    targets.append(((action.kind, s, m), name))
        pendings = comm.exchange(sends, receives, self.runtime.group)
        self.runtime.observer.posted(actions)
        self.leaving.extend(pendings[: len(sends)])
        # tables are free of circles even if every call is waited for at once
        while self.leaving and (len(self.leaving) > KEPT_SENDS or self.leaving[0].finished()):
            self.leaving.popleft().wait()
        for (target, name), pending in zip(targets, pendings[len(sends) :], strict=True):
            self.arriving.setdefault(target, {})[name] = pending

    def _take(self, kind: Kind, s: int, m: int) -> dict[str, Tensor]:
        with self.runtime.observer.arrived(Action(kind, s, m)):
            return {name: pending.wait() for name, pending in self.arriving.pop((kind, s, m)).items()}

    def _hand_over(self, kind: Kind, s: int, m: int, tensors: dict[str, Tensor]) -> None:
        self.arriving[kind, s, m] = {name: comm.done(t) for name, t in tensors.items()}

    def finish(self) -> None:
        """Wait for what is still on its way out."""
        for pending in self.leaving:
            pending.wait()


def _last_writers(row: Sequence[Action]) -> set[tuple[Kind, int, int]]:
    """The last B or W of a stage before each of its REDUCE."""
    latest: dict[int, tuple[Kind, int, int]] = {}
    found = set()
    for a in row:
        if a.kind is Kind.B or a.kind is Kind.W:
            latest[a.stage] = a.kind, a.stage, int(a.microbatch or 0)
        elif a.kind is Kind.REDUCE and a.stage in latest:
            found.add(latest[a.stage])
    return found
