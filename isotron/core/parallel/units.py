"""ZeRO-3: which weights are gathered when. A unit (a block, or a module at an end of the stage) at a time, in the
order of use, with the next one on its way. A pipeline table may have the weights of a stage held from one use to the
next: then nothing is dropped meanwhile.

For our own models this fills the socket `around` of `nn/decoder.py`: `enter` gathers before a unit's forward, `leave`
drops after it; in the graph they leave two identities whose backwards do the same the other way round. In the backward
of a recomputed unit its forward runs again; nothing is dropped in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isotron.core.parallel.shards import Bucket

NO_LOOKBACK = frozenset(
    {"embed", "positions", "types", "encoder_bias", "decoder_bias", "head"}
)  # their backwards need no weights


class Unit:
    """Buckets that are gathered together. `lookback`: whether the backward needs the weights."""

    def __init__(self, buckets: Sequence[Bucket], lookback: bool) -> None:
        self.buckets, self.lookback = buckets, lookback
        self.live = self.in_backward = self.held = False

    def start(self) -> None:
        """Start to gather, unless that has been done."""
        if not self.live:
            self.live = True
            for bucket in self.buckets:
                bucket.acquire()

    def read_ahead(self) -> None:
        """It will be gathered soon: what of its weights is in files begins to be read."""
        for bucket in () if self.live else self.buckets:
            bucket.read_ahead()

    def open(self) -> None:
        """Have the weights."""
        self.start()
        for bucket in self.buckets:
            bucket.wait_weights()

    def drop(self) -> None:
        """Let the weights go, unless they are held."""
        if self.live and not self.held:
            self.live = False
            for bucket in self.buckets:
                bucket.release()


class Units:
    """The units of a stage in the order of their use. `prefetch`: gather the next one meanwhile."""

    def __init__(self, buckets: Mapping[str, Sequence[Bucket]], prefetch: bool) -> None:
        self.units = {name: Unit(found, name not in NO_LOOKBACK) for name, found in buckets.items()}
        self._order = list(self.units.values())
        self._place = {id(unit): i for i, unit in enumerate(self._order)}
        self.prefetch = prefetch

    def enter(self, name: str, x: Tensor) -> Tensor:
        """x, with the weights of the unit that it goes into at hand."""
        unit = self.units[name]
        unit.open()
        if not any(u.in_backward for u in self._order):
            self._ahead(self._order[self._place[id(unit)] + 1 :])
        return _Hook.apply(x, self.end_backward, unit) if unit.lookback and x.requires_grad else x

    def leave(self, name: str, y: Tensor) -> Tensor:
        """y, which came out of the unit."""
        unit = self.units[name]
        if not unit.in_backward:
            unit.drop()
        return _Hook.apply(y, self.begin_backward, unit) if unit.lookback and y.requires_grad else y

    def hold(self, wanted: bool) -> None:
        """All weights of the stage come and stay, or go."""
        for unit in self._order:
            unit.held = wanted
            if wanted:
                unit.start()
            else:
                unit.drop()

    @contextmanager
    def at_hand(self, name: str) -> Iterator[None]:
        """Outside of a pass over the stage: the weights of a unit."""
        unit = self.units[name]
        unit.open()
        yield
        unit.drop()

    def begin_backward(self, unit: Unit) -> None:
        """The gradient of a unit's output is there."""
        unit.in_backward = True
        unit.open()
        self._ahead([u for u in reversed(self._order[: self._place[id(unit)]]) if u.lookback])

    def _ahead(self, coming: Sequence[Unit]) -> None:
        """The next unit starts to gather, and what the one behind it has in files is read; or only that of the next."""
        for number, unit in enumerate(coming[: 2 if self.prefetch else 1]):
            if number == 0 and self.prefetch:
                unit.start()
            else:
                unit.read_ahead()

    def end_backward(self, unit: Unit) -> None:
        """The gradient of a unit's input is there."""
        unit.in_backward = False
        unit.drop()

    def settle(self) -> None:
        """A pass over the stage is over: nothing stays."""
        for unit in self._order:
            self.end_backward(unit)


class _Hook(torch.autograd.Function):
    """x itself; in the backward `act(unit)` is called when its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Unit], None], unit: Unit) -> Tensor:
        ctx.act, ctx.unit = act, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        ctx.act(ctx.unit)
        return dx, None, None
