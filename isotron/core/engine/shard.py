"""Sharded data parallelism for any module in a loop of one's own: `isotron.core.shard`.

    sharded = shard(module, optimizer, zero=3)     # optimizer: made over module.parameters(), not used yet
    loss = module(...); loss.backward()            # as before, each rank on its own part of the batch
    sharded.clip_grad_norm_(1.0)
    optimizer.step(); sharded.zero_grad()

The same buffers and buckets as for our own models (`data.py`, `shards.py`), with hooks where those have sockets: before
and after the forward of each unit, on the gradient of its output, and on every parameter's gradient. The optimizer
steps flat parts of parameters, so its rule must work element by element (Adam, SGD, Lion; not LAMB or Muon).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from isotron.core.engine.order import Course, Turns
from isotron.core.engine.values import First, Initialiser, Source, own_values, put_on, values_of
from isotron.core.errors import refuse
from isotron.core.layout import Placed, Rule
from isotron.core.layout import shard as shard_of
from isotron.core.mesh import Mesh
from isotron.core.optim.clip import clip_factor, global_norm
from isotron.core.parallel.buckets import DENSE, Classes
from isotron.core.parallel.data import Flat, Partial, View
from isotron.core.parallel.shards import Sharding, sharing
from isotron.core.parallel.units import Unit, Units

ROOT = ""


def shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    zero: int = 3,
    shard_size: int = 0,
    units: Sequence[str] = (),
    bucket_size: int = 40_000_000,
    overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
    values: Initialiser | Source | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    hosted: bool = False,
    files: str = "",
    grad_dtype: torch.dtype | None = None,
) -> Sharded:
    """Shard a module's weights, gradients and optimizer over all ranks, in place.

    zero: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too. shard_size: ranks that share a set of shards, 0
    for all. units: names of the submodules whose weights are gathered together; without them the members of every
    `nn.ModuleList`. The weights of the first rank are given to all. Gradients are means over ranks. Without an
    optimizer they are sums, and the caller steps `views()` itself. hosted: under zero 3 own runs live in host memory,
    or in a file of the directory `files`.
    grad_dtype: without an optimizer, the type in which gradients of 16-bit weights add up instead of float32.

    A module on the meta device gets its weights on `device`, each rank its shards only: `values(name, tensor)` writes
    one parameter or buffer in place (on the CPU, torch's generator seeded by `seed` and the name), or `values` is a
    source of tensors such as a checkpoint's, which is read region by region.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if zero not in (0, 1, 2, 3):
        raise refuse(f"shard(zero={zero})", "what is sharded is 0, 1, 2 or 3", "zero=3")
    if shard_size < 0 or world % (shard_size or world):
        raise refuse(f"shard(shard_size={shard_size})", f"{world} ranks are cut into equal groups", "shard_size=0")
    if optimizer is not None and any(optimizer.state.values()):
        raise refuse("shard with an optimizer that has stepped", "its state is of whole parameters", "a new optimizer")
    mesh = Mesh(dist.get_rank() if world > 1 else 0, dp=world)
    drawn = values_of(module, values, seed)
    first = None if drawn is None else put_on(module, torch.device(device), drawn)
    if optimizer is not None and grad_dtype is not None:
        case = "an optimizer of torch wants gradients of its parameters' type, which is float32 or wider here"
        raise refuse(f"shard(grad_dtype={grad_dtype})", case, "grad_dtype=None")
    group = mesh.group("dp")
    stage = zero if world > 1 else 0
    frozen = tuple(n for n, p in module.named_parameters() if not p.requires_grad)
    unit_of = _unit_of(module, units or _lists(module))
    plan = Sharding(
        zero=stage,
        groups={DENSE: sharing(group.ranks, mesh.rank, mesh.group_of, (shard_size or world) if stage else 1)},
        bucket_size=bucket_size,
        classes=Classes(by_unit=stage == 3, frozen=frozen, unit_of=unit_of.__getitem__),
        overlap=overlap,
        transport=reduce_dtype,
        hosted=hosted,
        sums=grad_dtype,
        files=files,
    )
    return Sharded(module, optimizer, mesh, plan, unit_of, first)


class Sharded:
    """A module and its optimizer, sharded; made by `shard`. `unit_of`: parameter -> what it is gathered with."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mesh: Mesh,
        plan: Sharding,
        unit_of: Mapping[str, str],
        first: First | None,
    ) -> None:
        self.module, self.optimizer, self.mesh, self._first = module, optimizer, mesh, first
        self._unit_of = unit_of
        named = dict(module.named_parameters())
        self.flats = [self._flat(found, plan) for found in _by_dtype(named)]
        self._turns = Turns(self.flats, list(named), mesh.group("dp"), next(iter(named.values())).device)
        self._course = Course()
        self._steps = [] if optimizer is None else _into_optimizer(optimizer, named, self.views())
        self._begun = self._finished = self._called_back = False
        for name, p in named.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._take_gradient(name))
        self.units = self._hook_units(named, plan.overlap) if plan.zero == 3 else None
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self.finish())
            optimizer.register_step_post_hook(lambda *_: self.stepped())

    def _flat(self, named: Mapping[str, nn.Parameter], plan: Sharding) -> Flat:
        first = self._first or own_values(named, self.mesh.group("dp"))
        sizes, where = self.mesh.sizes, self.mesh.coordinate
        rules = {n: Rule(n, first.shapes[n] or (1,)) for n in named}
        placed = {n: Placed(n, r, shard_of(r, where, sizes)) for n, r in rules.items()}
        one = next(iter(named.values()))
        flat = Flat(named, placed, plan, one.dtype, one.device, first.fill, Partial(), {})
        for n, p in named.items():
            p.data = p.data.view(first.shapes[n]) if tuple(p.data.shape) != first.shapes[n] else p.data
        return flat

    # ---- weights come and go ---------------------------------------------------------------------------------------

    def _hook_units(self, named: Mapping[str, nn.Parameter], prefetch: bool) -> Units:
        names = [unit for unit in dict.fromkeys(self._unit_of.values()) if unit != ROOT]
        buckets = {}
        for unit in (*names, ROOT):
            own = [p for n, p in named.items() if self._unit_of[n] == unit]
            held = (flat.bucket_of.get(id(p)) for p in own for flat in self.flats)
            buckets[unit] = list({id(b): b for b in held if b is not None}.values())
        units = Units(buckets, prefetch)
        self._owed: dict[str, set[str]] = {u: set() for u in buckets}
        self._trained = {u: {n for n, p in named.items() if self._unit_of[n] == u and p.requires_grad} for u in buckets}
        self._mixed = {self._unit_of[n] for n, p in named.items() if not p.requires_grad}
        for name in names:
            layer = self.module.get_submodule(name)
            layer.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            layer.register_forward_hook(lambda _m, _x, y, name=name: self._leave(name, y))
        self.module.register_forward_pre_hook(lambda *_: units.units[ROOT].open())
        self.module.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else units.settle())
        return units

    def _enter(self, name: str) -> None:
        if self.units is not None:
            self.units.enter(name, _NOTHING)

    def _leave(self, name: str, y: Any) -> None:
        if self.units is not None:
            self.units.leave(name, _NOTHING)
            unit = self.units.units[name]
            if torch.is_grad_enabled() and not self._called_back:  # not of a recomputed unit
                self._course.ran(name)
            for tensor in _tensors(y):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _g: self._begin_backward(name, unit))

    def _begin_backward(self, name: str, unit: Unit) -> None:
        self._begin()
        self._call_back()
        self._owed[name] = set(self._trained[name])
        if self.units is not None:
            for over in self._course.come_to(name) if self._turns.rounds else ():
                for bucket in self.units.units[over].buckets:
                    self._turns.complete_everywhere(bucket)
            self.units.begin_backward(unit)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all its weights at hand, for `state_dict()` and the like; changes to them are lost."""
        buckets = [b for flat in self.flats for b in flat.buckets]
        for bucket in buckets:
            bucket.acquire()
        for bucket in buckets:
            bucket.wait_weights()
        try:
            yield self.module
        finally:
            for bucket in buckets:
                bucket.release()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """The parts of parameters that this rank steps."""
        return [v for flat in self.flats for v in flat.views()]

    def parts(self) -> list[nn.Parameter]:
        """The same, in float32 or wider, for an optimizer made later; around its step come `finish` and `stepped`."""
        self._steps = [(_part(view), view) for view in self.views()]
        return [part for part, _ in self._steps]

    def _begin(self) -> None:
        if not self._begun:
            self._begun, self._finished = True, False
            self._turns.begin()
            for flat in self.flats:
                flat.begin(None if self.units is not None else self._turns.complete)

    def last_backward(self) -> None:
        """The next backward is the last of the step: what it completes is reduced while it goes on."""
        self._begin()
        for flat in self.flats if self.units is None else ():
            flat.watch(last=True)

    def _take_gradient(self, name: str) -> Callable[[Tensor], None]:
        unit = self._unit_of[name]

        def take(p: Tensor) -> None:
            self._begin()
            self._call_back()
            grad, p.grad = p.grad, None
            if grad is not None:
                sink = p.grad_sink  # type: ignore[attr-defined]
                sink.add(grad.view(sink.buffer.shape))
            if self.units is not None and unit != ROOT:
                self._owed[unit].discard(name)
                if not self._owed[unit] and unit not in self._mixed:  # a frozen weight may still be needed
                    self.units.end_backward(self.units.units[unit])

        return take

    def _call_back(self) -> None:
        """Clean up when this backward ends."""
        if not self._called_back:
            self._called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._called_back = False
        if self.units is not None:
            self.units.settle()
        self._course = Course()
        self._turns.end_backward(always=self.units is not None)

    @torch.no_grad()
    def finish(self) -> None:
        """Gradients are complete: means over all ranks, where the optimizer finds them. `optimizer.step` calls it."""
        if self._finished:
            return
        self._begin()
        self._finished = True
        self._turns.finish()
        for flat in self.flats:
            flat.finish_reduce()
        for p, view in self._steps:
            view.grad.div_(self.mesh.size)
            p.grad = view.grad

    def clip_grad_norm_(self, limit: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `limit`; returns the norm before."""
        self.finish()
        norm = global_norm([v for _, v in self._steps], self.mesh.group("dp"))
        for _, view in self._steps:
            view.grad.mul_(clip_factor(norm, limit))
        return norm

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has stepped: new weights to all who keep them."""
        for p, view in self._steps:
            if p.data_ptr() != view.weight.data_ptr():
                view.weight.copy_(p)
        self.send()

    def send(self) -> None:
        """Stepped weights to the ranks that keep them; gradients are forgotten."""
        for flat in self.flats:
            flat.start_gather(overlap=False)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget gradients; a step does so too. Where sums of this step have begun they are brought to their end: a
        backward is forgotten by all ranks or by none.
        """
        if self._begun and self._turns.begun:
            self.finish()
        self._begun = self._finished = False
        for p, _ in self._steps:
            p.grad = None


_NOTHING = torch.empty(0)


def _unit_of(module: nn.Module, units: Sequence[str]) -> dict[str, str]:
    """What each parameter is gathered with: the first of the units that it is in, else the rest of the module."""
    named = [name for name, _ in module.named_parameters()]
    return {n: next((u for u in units if n.startswith(f"{u}.")), ROOT) for n in named}


def _lists(module: nn.Module) -> tuple[str, ...]:
    """The members of every outermost ModuleList."""
    found: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.ModuleList) and not any(name.startswith(f"{f}.") for f in found):
            found += [f"{name}.{i}".lstrip(".") for i in range(len(layer))]
    return tuple(found)


def _by_dtype(named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    kinds = dict.fromkeys(p.dtype for p in named.values())
    return [{n: p for n, p in named.items() if p.dtype == kind} for kind in kinds]


def _into_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], views: Sequence[View]
) -> list[tuple[nn.Parameter, View]]:
    """Put this rank's parts, in float32 or wider, in the place of whole parameters; each stays in its group."""
    parts: dict[int, list[nn.Parameter]] = {}
    steps = []
    for view in views:
        part = _part(view)
        parts.setdefault(id(named[view.placed.name]), []).append(part)
        steps.append((part, replace(view)))
    for group in optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in parts.get(id(p), ())]
    return steps


def _part(view: View) -> nn.Parameter:
    same = view.weight.dtype == view.grad.dtype
    return nn.Parameter(view.weight if same else view.weight.to(view.grad.dtype))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
