"""First values of a module that is to be sharded: its own, or, on the meta device, an initialiser's or a source's.

A rank holds one parameter as a whole for a moment when an initialiser writes it, and none when values are read from a
source: so a model that fits nowhere can be built on the ranks that will hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.errors import refuse
from isotron.core.layout import Box, Placed, whole
from isotron.core.mesh import Group
from isotron.core.parallel.data import Fill
from isotron.core.random import key

Initialiser = Callable[[str, Tensor], Any]


class Source(Protocol):
    """Tensors by name, readable region by region: a checkpoint's `Source`, or one of your own."""

    def names(self) -> Any:
        """Names of all tensors."""
        ...

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape."""
        ...

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Copy a region into `out`, which has the region's shape."""
        ...


@dataclass(frozen=True)
class First:
    """Shapes of parameters by name, and what writes rows of their first values."""

    shapes: Mapping[str, tuple[int, ...]]
    fill: Fill


class Drawn:
    """Values that `initialise(name, tensor)` writes in place, a whole parameter at a time, on the CPU.

    It draws from torch's generator, seeded anew for every name: all ranks see the same numbers.
    """

    def __init__(self, initialise: Initialiser, seed: int) -> None:
        self._initialise, self._seed = initialise, seed

    def whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One parameter or buffer."""
        values = torch.zeros(shape, dtype=dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(key(self._seed, name))
            self._initialise(name, values)
        return values

    def part(self, name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Tensor:
        """Rows of one parameter."""
        return self.whole(name, shape, dtype).reshape(shape or (1,))[box.slices()]


class Read:
    """Values from a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One buffer."""
        return self.part(name, shape, whole(shape), dtype).view(shape)

    def part(self, name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Tensor:
        """Rows of one parameter."""
        region = box if shape else Box((), ())
        out = torch.empty(region.shape, dtype=self._source.info(name)[0])
        self._source.read(name, region, out)
        return out.to(dtype).view(box.shape)


def values_of(module: nn.Module, given: Initialiser | Source | None, seed: int) -> Drawn | Read | None:
    """Where the values of a module come from that is on the meta device, be it in part; None for one that has its own.

    Refused where some are missing.
    """
    tensors = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if b.is_meta)]
    needed = {n: tuple(t.shape) for n, t in tensors}
    if not any(t.is_meta for _, t in tensors):
        return None
    if given is None:
        fix = "values=an initialiser (name, tensor) or a source of tensors, or a module on the CPU"
        raise refuse("shard of a module on the meta device", "its weights have no values yet", fix)
    if callable(given):
        return Drawn(given, seed)
    names = set(given.names())
    wrong = [n for n, shape in needed.items() if n not in names or tuple(given.info(n)[1]) != shape]
    if wrong:
        case = f"the source has no tensor of the right shape for {', '.join(wrong[:5])}"
        raise refuse("shard(values=source)", case, "values=an initialiser, which writes buffers too")
    return Read(given)


def put_on(module: nn.Module, device: torch.device, values: Drawn | Read) -> First:
    """Give parameters on the meta device a place without memory, and buffers their values."""
    shapes = {}
    for name, p in list(module.named_parameters()):
        shapes[name] = tuple(p.shape)
        if p.is_meta:
            empty = nn.Parameter(torch.empty(0, dtype=p.dtype, device=device), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, empty)
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            full = values.whole(name, tuple(buffer.shape), buffer.dtype).to(device)
            setattr(module.get_submodule(owner), leaf, full)

    def fill(placed: Placed, box: Box, out: Tensor) -> None:
        out.copy_(values.part(placed.name, shapes[placed.name], box, out.dtype))

    return First(shapes, fill)


def own_values(named: Mapping[str, nn.Parameter], group: Group) -> First:
    """The values that the first rank's parameters have."""
    given = {n: comm.broadcast(p.data, group) for n, p in named.items()}

    def fill(placed: Placed, box: Box, out: Tensor) -> None:
        out.copy_(given[placed.name].reshape(placed.rule.shape)[box.slices()])

    return First({n: tuple(x.shape) for n, x in given.items()}, fill)
