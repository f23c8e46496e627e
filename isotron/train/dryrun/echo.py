"""Microbatches that only repeat: what a stage's forward and backward do to memory and say to others, measured once.

All microbatches of a step have the same shapes. The first backward of a stage fills the gradients, the second adds to
them as every later one does, and the last may start their sum; those three microbatches are computed. The others are
echoes of the second: as many bytes are kept from forward to backward, the fullest moments lie as high above the bytes
that were alive before, the same communications are counted. Sends and receives between stages are always made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from isotron.config.schema import RunConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.pipeline import runtime
from isotron.train.dryrun.calls import Calls, Key, Sums
from isotron.train.dryrun.live import LiveBytes

FIRST, SECOND = 0, 1
COMPUTED = 3  # the first, the second and the last microbatch
Result = tuple[dict[str, Tensor], dict[str, tuple[Tensor, float]]]


def can_echo(config: RunConfig) -> bool:
    """Whether every microbatch but the first and the last does the same: no part is put off, sharded or kept anew."""
    layout = config.layout
    plain = layout.schedule_name in ("1f1b", "gpipe", "interleaved") and layout.zero_stage < 2
    return plain and not (layout.recompute_keep or layout.cpu_offloading or layout.hybrid_context_parallel)


@dataclass
class _Seen:
    """One action of a stage: bytes above those before it at the fullest moment, and what it said."""

    above: int
    said: dict[Key, Sums]


@dataclass
class _Stage:
    """What is known of a stage: its second microbatch's actions, result and kept bytes."""

    forward: _Seen | None = None
    backward: _Seen | None = None
    result: Result | None = None
    kept: int = 0


class _Hold(torch.autograd.Function):
    """Keeps bytes from forward to backward; gradients of the inputs have no numbers."""

    @staticmethod
    def forward(ctx: Any, kept: int, shapes: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.room = torch.empty(kept, dtype=torch.uint8)
        ctx.save_for_backward(*inputs)
        return tuple(torch.empty(x.shape, dtype=x.dtype) for x in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.room = None
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(torch.empty_like(x) if needs else None for x, needs in needed)


@dataclass
class Echo:
    """Stands in for the stages of a model over a step of `count` microbatches."""

    model: ParallelModel
    live: LiveBytes
    calls: Calls
    count: int
    _stages: dict[int, _Stage] = field(default_factory=dict)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Microbatches that only repeat are not computed inside."""
        with ExitStack() as stack:
            for name in ("forward", "backward"):
                wrapped = self._watched(name, getattr(runtime._Pass, name))
                stack.enter_context(patch.object(runtime._Pass, name, wrapped))
            yield

    def _watched(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def action(step: Any, s: int, m: int, received: dict[str, Tensor]) -> None:
            stage = self._stages.setdefault(s, _Stage())
            compute = partial(real, step, s, m, received)
            if m in (FIRST, self.count - 1):
                compute()
            elif m == SECOND:
                self._record(stage, name, compute, s)
            else:
                self._repeat(stage, name, compute, s)

        return action

    def _record(self, stage: _Stage, name: str, compute: Callable[[], None], s: int) -> None:
        """Compute the second microbatch, and note what it does."""
        before, highest, said = self.live.now, self.live.peak, self.calls.copy()
        self.live.restart()
        module = self.model.stages[s].module
        whole = module.forward

        def listened(*args: Any, **kwargs: Any) -> Result:
            stage.result = whole(*args, **kwargs)
            return stage.result

        with patch.object(module, "forward", listened):
            compute()
        seen = _Seen(self.live.peak - before, self.calls.beyond(said))
        self.live.peak = max(highest, self.live.peak)
        if name == "forward" and stage.result is not None:
            stage.forward, outputs = seen, stage.result[0]
            stage.kept = self.live.now - before - self.live.counted(list(outputs.values()))
            stage.result = _described(stage.result)
        else:
            stage.backward = seen

    def _repeat(self, stage: _Stage, name: str, compute: Callable[[], None], s: int) -> None:
        """Do the same to memory and to the list of communications, without computing."""
        seen = stage.forward if name == "forward" else stage.backward
        if seen is None:
            raise RuntimeError(f"stage {s} is to repeat a {name} that it has not done")
        before = self.live.now
        with patch.object(self.model.stages[s].module, "forward", self._again(stage)):
            compute()
        self.live.peak = max(self.live.peak, before + seen.above)
        self.calls.add(seen.said)

    def _again(self, stage: _Stage) -> Callable[..., Result]:
        def forward(_batch: Any, received: dict[str, Tensor], _weight: float) -> Result:
            if stage.result is None:
                raise RuntimeError("there is no result to repeat")
            outputs, terms = stage.result
            wanted = [x for x in (*outputs.values(), *(x for x, _ in terms.values()))]
            inputs = [x for x in received.values() if x.requires_grad] or [torch.zeros((), requires_grad=True)]
            made = iter(_Hold.apply(max(stage.kept, 0), wanted, *inputs))  # type: ignore[no-untyped-call]
            given = [x if old.requires_grad else x.detach() for x, old in zip(made, wanted, strict=True)]
            tensors = iter(given)
            again = {name: next(tensors) for name in outputs}
            return again, {name: (next(tensors), weight) for name, (_, weight) in terms.items()}

        return forward


def _described(result: Result) -> Result:
    """Shapes, types and whether gradients are wanted, without a graph."""
    with torch.no_grad():
        outputs = {k: _like(x) for k, x in result[0].items()}
        return outputs, {k: (_like(x), weight) for k, (x, weight) in result[1].items()}


def _like(x: Tensor) -> Tensor:
    """A tensor of this shape and type that is one number large."""
    made = torch.empty((), dtype=x.dtype).expand(x.shape)
    return made.requires_grad_() if x.requires_grad else made
