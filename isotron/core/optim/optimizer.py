"""The optimizer of a model: masters and states of the rows that this rank steps, each under its own update rule.

Masters are float32 or wider; weights that are as wide as their gradients are their own masters. States are cut like
the gradients, whatever the layout, and are read wide, stepped, and written back in the type that they are kept in.
What is offloaded is kept on the host or on disk and stepped there (`hosted.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isotron.core.errors import refuse
from isotron.core.layout import Box, Ints
from isotron.core.mapped import ALIGN
from isotron.core.mesh import ALONE, Group
from isotron.core.optim.adafactor import Adafactor
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.elementwise import SGD, Adam, Lion
from isotron.core.optim.groups import Settings, settle
from isotron.core.optim.hosted import Arrived, Courier, grouped
from isotron.core.optim.hosted import Group as HostGroup
from isotron.core.optim.kept import Kept, Remainder, Whole, Zeros, kept, zeros_on
from isotron.core.optim.method import Method, Shared, Todo
from isotron.core.optim.muon import Muon
from isotron.core.parallel.data import View
from isotron.core.parallel.offload import Offload, hosted


@dataclass(frozen=True)
class Slot:
    """One tensor of optimizer state under its global name: `exp_avg/NAME`, `master/NAME`."""

    name: str
    view: View
    kept: Kept

    @property
    def shape(self) -> Ints:
        """Of the whole."""
        return self.view.placed.rule.shape

    def pieces(self, flat: Tensor, owned: bool = True) -> list[tuple[Box, Tensor]]:
        """(global box, tensor) of those that this rank saves, or of all that it holds."""
        return list(self.view.pieces(flat, owned)) if self.view.counts or not owned else []


class Optimizer:
    """Optimizer state of the given views. `updates` counts applied steps and is part of the state.

    `settings`: by parameter name, for all parameters of the model; without them the views' own names decide.
    `neighbours`, `like`: see `Muon`. `views` are those that train. `offload`: what is stepped on the host.
    """

    def __init__(
        self,
        views: Sequence[View],
        cfg: OptimConfig,
        settings: Mapping[str, Settings] | None = None,
        neighbours: Group = ALONE,
        like: Tensor | None = None,
        offload: Offload | None = None,
    ) -> None:
        shapes = {v.placed.name: v.placed.rule.shape for v in views}
        self.settings = settle(shapes, cfg, whole=False) if settings is None else settings
        self.cfg, self.updates = cfg, 0
        where = like if like is not None else views[0].grad if views else torch.empty(0)
        self._device = where.device  # of the work; gradients may be on the host
        self.views = [v for v in views if not self.settings[v.placed.name].frozen]
        self.own_masters = not all(v.weight.dtype == v.wide for v in self.views)
        self._of = self._by_method()
        self.methods = {name: self._method(name, neighbours, like) for name in self._of}
        self._groups = self._host_groups(offload or Offload())
        self._hosted = {i: group.home for groups in self._groups.values() for group in groups for i in group.places}
        self._courier = Courier(self._device) if self._hosted else None
        self.states = [self._new_states(i, v) for i, v in enumerate(self.views)]
        self._here = {name: self._parts([i for i in of if i not in self._hosted]) for name, of in self._of.items()}

    def _host_groups(self, offload: Offload) -> dict[str, list[HostGroup]]:
        """Rule -> groups of what is kept on the host, and stepped there but for a rule that works on whole matrices."""
        if not offload.fraction:
            return {}
        if self.cfg.master_remainders:
            case = "masters on the host are whole, and their weights are not beside them"
            raise refuse("--optimizer-cpu-offload --master-remainders", case, "one of the two")
        sizes = [v.box.size for v in self.views]
        count = hosted(sizes, offload.fraction)

        def needs(i: int) -> int:
            kinds = 1 + len(self.methods[self.settings[self.views[i].placed.name].optimizer].states)
            return kinds * (sizes[i] * (self.views[i].wide.itemsize + 1) + 2 * ALIGN)

        found = {name: [i for i in places if i < count] for name, places in self._of.items()}
        return {name: grouped(chosen, sizes, needs, offload.directory, self._device) for name, chosen in found.items()}

    def _by_method(self) -> dict[str, list[int]]:
        """Rule -> places of its views, in one order on every rank; rules that only other ranks need are there too."""
        used = sorted({s.optimizer for s in self.settings.values() if not s.frozen} or {self.cfg.optimizer})
        of: dict[str, list[int]] = {name: [] for name in used}
        for i, view in enumerate(self.views):
            of[self.settings[view.placed.name].optimizer].append(i)
        return of

    def _method(self, name: str, neighbours: Group, like: Tensor | None) -> Method:
        match name:
            case "sgd":
                return SGD(self.cfg)
            case "lion":
                return Lion(self.cfg)
            case "muon" | "adafactor":
                views = [self.views[i] for i in self._of[name]]
                empty = views[0].grad.new_empty(0, dtype=views[0].wide) if like is None else like
                return (Muon if name == "muon" else Adafactor)(self.cfg, views, neighbours, empty)
        return Adam(self.cfg, decoupled=name == "adamw")

    def _new_states(self, i: int, view: View) -> dict[str, Kept]:
        home = self._hosted.get(i)
        zeros = zeros_on(view.grad.device) if home is None else home.zeros
        states: dict[str, Kept] = {"master": self._new_master(view, zeros)}
        for name in self.methods[self.settings[view.placed.name].optimizer].states:
            second = name == "exp_avg_sq"
            dtype = self.cfg.exp_avg_sq_dtype if second else self.cfg.exp_avg_dtype
            states[name] = kept(view.box.shape, view.wide, dtype, not second, zeros)
        return states

    def _new_master(self, view: View, zeros: Zeros) -> Kept:
        if view.weight.dtype == view.wide:
            return Whole(view.weight, own=False)
        if self.cfg.master_remainders:
            return Remainder(view.weight)
        return Whole(zeros((view.box.size,), view.wide).copy_(view.weight))

    # ---- stepping --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, gradient_factor: float) -> None:
        """One update with gradients x gradient_factor; then weights are the rounded masters."""
        for name, method in self.methods.items():
            groups = self._groups.get(name, [])
            if method.together:
                self._step_together(groups, self._of[name], method, lr, weight_decay, gradient_factor)
                continue
            for part in self._here[name]:
                self._update(part, method, lr, weight_decay, gradient_factor)
            self._round([i for part in self._here[name] for i in part])
            self._step_on_host(groups, method, lr, weight_decay, gradient_factor)
        self.updates += 1

    def _step_together(
        self, groups: list[HostGroup], chosen: list[int], method: Method, lr: float, weight_decay: float, f: float
    ) -> None:
        """All at once where the gradients are; what is kept on the host comes for the step and goes back."""
        for group in groups:
            group.home.fetch()
        self._update(chosen, method, lr, weight_decay, f)
        self._round(chosen)
        for group in groups:
            group.home.leave()

    def _step_on_host(self, groups: list[HostGroup], method: Method, lr: float, weight_decay: float, f: float) -> None:
        """Group by group, while the next one's gradients and state are on their way."""
        coming = self._send(groups[0]) if groups else None
        for number, group in enumerate(groups):
            arrived = coming
            if arrived is not None:
                arrived.wait()
            coming = self._send(groups[number + 1]) if number + 1 < len(groups) else None
            self._update(list(group.places), method, lr, weight_decay, f, arrived)
            self._round(list(group.places))
            group.home.leave()

    def _send(self, group: HostGroup) -> Arrived | None:
        group.home.fetch()
        return None if self._courier is None else self._courier.send([self.views[i] for i in group.places])

    def _parts(self, chosen: list[int]) -> list[list[int]]:
        """What is stepped at once: everything, or one view at a time where states are unpacked or gradients widened."""
        packed = {i for i in chosen if any(not k.direct for k in self.states[i].values())}
        packed |= {i for i in chosen if self.views[i].grad.dtype != self.views[i].wide}
        plain = [i for i in chosen if i not in packed]
        return ([plain] if plain else []) + [[i] for i in chosen if i in packed]

    def _update(
        self,
        chosen: list[int],
        method: Method,
        lr: float,
        weight_decay: float,
        factor: float,
        arrived: Arrived | None = None,
    ) -> None:
        """`arrived`: gradients, and weights that are their own masters, on the host."""
        views, settings = [self.views[i] for i in chosen], [self.settings[self.views[i].placed.name] for i in chosen]
        opened = [{name: k.read() for name, k in self.states[i].items()} for i in chosen]
        if arrived is None and self._hosted:  # what is kept on the host comes to its gradient
            opened = [{n: t.to(v.grad.device) for n, t in o.items()} for v, o in zip(views, opened, strict=True)]
        for tensors, weight in () if arrived is None else zip(opened, arrived.weights, strict=True):
            tensors["master"] = tensors["master"] if weight is None else weight
        method.update(
            Todo(
                views,
                [o["master"] for o in opened],
                _widened(views, opened) if arrived is None else arrived.grads,
                {name: [o[name] for o in opened] for name in method.states},
                [lr * s.lr_mult for s in settings],
                [weight_decay * _decay(v, s) for v, s in zip(views, settings, strict=True)],
                factor,
                self.updates,
            )
        )
        if arrived is None and not self._hosted and all(k.direct for i in chosen for k in self.states[i].values()):
            return  # stepped where it is kept
        for i, tensors in zip(chosen, opened, strict=True):
            for name, wide in tensors.items():
                self.states[i][name].write(wide, self.updates)

    def _round(self, chosen: list[int]) -> None:
        """Weights from masters."""
        masters = [(self.views[i].weight, self.states[i]["master"]) for i in chosen]
        pairs = [(w, m.tensor) for w, m in masters if isinstance(m, Whole) and m.own]
        if pairs:
            torch._foreach_copy_([w for w, _ in pairs], [m for _, m in pairs])

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def slots(self) -> Iterator[Slot | Shared]:
        """All state, in one order of kinds; masters only where they are not the weights."""
        for kind in dict.fromkeys(name for states in self.states for name in states):
            for view, states in zip(self.views, self.states, strict=True):
                if kind in states and not (kind == "master" and view.weight.dtype == view.wide):
                    yield Slot(f"{kind}/{view.placed.name}", view, states[kind])
        for method in self.methods.values():
            yield from method.shared()

    def pieces(self) -> Iterator[tuple[str, Ints, torch.dtype, list[tuple[Box, Tensor]]]]:
        """(kind/name, global shape, dtype, [(global box, tensor)]) of all state; the boxes are what this rank saves."""
        for slot in self.slots():
            tensor = slot.kept.stored()
            yield slot.name, slot.shape, tensor.dtype, slot.pieces(tensor)

    def nbytes(self, *kinds: str, host: bool | None = None) -> int:
        """Bytes of some kinds of state of this rank, of all without a name; `host`: there alone, or elsewhere alone."""
        chosen = (s for i, s in enumerate(self.states) if host is None or (i in self._hosted) == host)
        own = sum(k.nbytes() for states in chosen for name, k in states.items() if not kinds or name in kinds)
        if host:
            return own
        found = {id(s.kept): s for m in self.methods.values() for s in m.shared()}.values()
        return own + sum(s.kept.nbytes() for s in found if not kinds or s.name.split("/")[0] in kinds)


def _widened(views: Sequence[View], opened: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Gradients in the type of masters."""
    pairs = zip(views, opened, strict=True)
    return [v.grad if v.grad.dtype == o["master"].dtype else v.grad.to(o["master"].dtype) for v, o in pairs]


def _decay(view: View, settings: Settings) -> float:
    if settings.wd_mult is not None:
        return settings.wd_mult
    return 1.0 if view.placed.rule.decay else 0.0
