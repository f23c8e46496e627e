"""What an update rule is: the state that it keeps per element, and one update of a list of tensors.

A rule sees wide tensors (float32 or float64) in whatever cut the layout made; only Muon asks what they are parts of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from isotron.core.layout import Box, Ints
from isotron.core.optim.kept import Kept
from isotron.core.parallel.data import View


@dataclass(frozen=True)
class Shared:
    """State that all ranks of a stage hold alike, under the global name of a parameter and with a shape of its own.

    `spots`: (region of the whole, where it begins in the flat tensor that is kept, whether this rank saves it).
    """

    name: str
    shape: Ints
    kept: Kept
    spots: tuple[tuple[Box, int, bool], ...]

    def pieces(self, flat: Tensor, owned: bool = True) -> list[tuple[Box, Tensor]]:
        """(region, tensor) of those that this rank saves, or of all."""
        spots = ((box, start) for box, start, saves in self.spots if saves or not owned)
        return [(box, flat[start : start + box.size].view(box.shape)) for box, start in spots]


@dataclass(frozen=True)
class Todo:
    """One update of some parameters: entry i of every list is one view's.

    Gradients count `factor` times (unscaling and clipping); `updates` were applied before. `states`: name -> tensors.
    """

    views: Sequence[View]
    masters: list[Tensor]
    grads: list[Tensor]
    states: dict[str, list[Tensor]]
    lrs: list[float]
    decays: list[float]
    factor: float
    updates: int

    def alike(self) -> Iterator[Todo]:
        """The same in parts of one learning rate and weight decay each."""
        rates = dict.fromkeys(zip(self.lrs, self.decays, strict=True))
        if len(rates) == 1:
            yield self
            return
        for rate in rates:
            at = [i for i, r in enumerate(zip(self.lrs, self.decays, strict=True)) if r == rate]
            yield Todo(
                [self.views[i] for i in at],
                [self.masters[i] for i in at],
                [self.grads[i] for i in at],
                {name: [tensors[i] for i in at] for name, tensors in self.states.items()},
                [self.lrs[i] for i in at],
                [self.decays[i] for i in at],
                self.factor,
                self.updates,
            )


class Method(Protocol):
    """An update rule. `states`: names of what it keeps, each of the parameter's shape, zero at first.

    `together`: its updates are one collective operation, which a rank without parameters takes part in.
    """

    states: tuple[str, ...]
    together: bool

    def update(self, todo: Todo) -> None:
        """Change masters and states in place; gradients may be used up."""
        ...

    def shared(self) -> Iterable[Shared]:
        """What it keeps beside the states of single parameters."""
        ...
