"""The optimizer of a model: masters and states of the rows that this rank steps, each under its own update rule.

Masters are float32 or wider; weights that are as wide as their gradients are their own masters. States are cut like
the gradients, whatever the layout, and are read wide, stepped, and written back in the type that they are kept in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isotron.core.layout import Box
from isotron.core.mesh import ALONE, Group
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.elementwise import SGD, Adam, Lion
from isotron.core.optim.groups import Settings, settle
from isotron.core.optim.kept import Kept, Remainder, Whole, kept
from isotron.core.optim.method import Method, Todo
from isotron.core.optim.muon import Muon
from isotron.core.parallel.data import View


@dataclass(frozen=True)
class Slot:
    """One tensor of optimizer state under its global name: `exp_avg/NAME`, `master/NAME`."""

    name: str
    view: View
    kept: Kept

    @property
    def packed(self) -> bool:
        """Whether a checkpoint holds it in another form."""
        return self.kept.packed


class Optimizer:
    """Optimizer state of the given views. `updates` counts applied steps and is part of the state.

    `settings`: by parameter name, for all parameters of the model; without them the views' own names decide.
    `neighbours`, `like`: see `Muon`. `views` are those that train.
    """

    def __init__(
        self,
        views: Sequence[View],
        cfg: OptimConfig,
        settings: Mapping[str, Settings] | None = None,
        neighbours: Group = ALONE,
        like: Tensor | None = None,
    ) -> None:
        shapes = {v.placed.name: v.placed.rule.shape for v in views}
        self.settings = settle(shapes, cfg, whole=False) if settings is None else settings
        self.cfg, self.updates = cfg, 0
        self.views = [v for v in views if not self.settings[v.placed.name].frozen]
        self.own_masters = not all(v.weight.dtype == v.grad.dtype for v in self.views)
        self._of = self._by_method()
        self.methods = {name: self._method(name, neighbours, like) for name in self._of}
        self.states = [self._new_states(v) for v in self.views]

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
            case "muon":
                views = [self.views[i] for i in self._of[name]]
                return Muon(self.cfg, views, neighbours, views[0].grad.new_empty(0) if like is None else like)
        return Adam(self.cfg, decoupled=name == "adamw")

    def _new_states(self, view: View) -> dict[str, Kept]:
        states: dict[str, Kept] = {"master": self._new_master(view)}
        for name in self.methods[self.settings[view.placed.name].optimizer].states:
            second = name == "exp_avg_sq"
            dtype = self.cfg.exp_avg_sq_dtype if second else self.cfg.exp_avg_dtype
            states[name] = kept(view.box.shape, view.grad, dtype, signed=not second)
        return states

    def _new_master(self, view: View) -> Kept:
        if view.weight.dtype == view.grad.dtype:
            return Whole(view.weight, own=False)
        if self.cfg.master_remainders:
            return Remainder(view.weight)
        return Whole(view.weight.to(view.grad.dtype))

    # ---- stepping --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, gradient_factor: float) -> None:
        """One update with gradients x gradient_factor; then weights are the rounded masters."""
        for name, method in self.methods.items():
            for part in self._parts(self._of[name], method):
                self._update(part, method, lr, weight_decay, gradient_factor)
        self.updates += 1
        self.round_masters()

    def _parts(self, chosen: list[int], method: Method) -> list[list[int]]:
        """What is stepped at once: everything, or one view at a time where states must be unpacked first."""
        if method.together:
            return [chosen]
        packed = {i for i in chosen if any(not k.direct for k in self.states[i].values())}
        plain = [i for i in chosen if i not in packed]
        return ([plain] if plain else []) + [[i] for i in chosen if i in packed]

    def _update(self, chosen: list[int], method: Method, lr: float, weight_decay: float, factor: float) -> None:
        views, settings = [self.views[i] for i in chosen], [self.settings[self.views[i].placed.name] for i in chosen]
        opened = [{name: k.read() for name, k in self.states[i].items()} for i in chosen]
        method.update(
            Todo(
                views,
                [o["master"] for o in opened],
                [v.grad for v in views],
                {name: [o[name] for o in opened] for name in method.states},
                [lr * s.lr_mult for s in settings],
                [weight_decay * _decay(v, s) for v, s in zip(views, settings, strict=True)],
                factor,
                self.updates,
            )
        )
        for i, tensors in zip(chosen, opened, strict=True):
            for name, wide in tensors.items():
                self.states[i][name].write(wide, self.updates)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Weights from masters."""
        pairs = [(v.weight, m.tensor) for v, m in self._masters() if isinstance(m, Whole) and m.own]
        if pairs:
            torch._foreach_copy_([w for w, _ in pairs], [m for _, m in pairs])

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters from weights: after loading weights alone."""
        for view, master in self._masters():
            if view.weight.dtype != view.grad.dtype:
                master.write(view.weight.to(view.grad.dtype))

    def _masters(self) -> Iterator[tuple[View, Kept]]:
        return ((v, states["master"]) for v, states in zip(self.views, self.states, strict=True))

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def slots(self) -> Iterator[Slot]:
        """All state, in one order of kinds; masters only where they are not the weights."""
        for kind in dict.fromkeys(name for states in self.states for name in states):
            for view, states in zip(self.views, self.states, strict=True):
                if kind in states and not (kind == "master" and view.weight.dtype == view.grad.dtype):
                    yield Slot(f"{kind}/{view.placed.name}", view, states[kind])

    def pieces(self) -> Iterator[tuple[str, View, torch.dtype, list[tuple[Box, Tensor]]]]:
        """(kind/name, view, dtype, [(global box, tensor)]) of all state that this rank saves."""
        for slot in self.slots():
            tensor = slot.kept.stored()
            yield slot.name, slot.view, tensor.dtype, list(slot.view.pieces(tensor))

    def nbytes(self, *kinds: str) -> int:
        """Bytes of some kinds of state on this rank; of all without a name."""
        found = (k for states in self.states for name, k in states.items() if not kinds or name in kinds)
        return sum(k.nbytes() for k in found)


def _decay(view: View, settings: Settings) -> float:
    if settings.wd_mult is not None:
        return settings.wd_mult
    return 1.0 if view.placed.rule.decay else 0.0
