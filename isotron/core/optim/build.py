"""The optimizer of a model in a layout, with the settings of all its parameters known and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch

from isotron.core.checkpoint.weights import global_names
from isotron.core.layout import Ints
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.groups import settle
from isotron.core.optim.mup import initial_factor, width_of
from isotron.core.optim.optimizer import Optimizer
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout

Kind = TypeVar("Kind", bound=Optimizer)


@overload
def make_optimizer(model: ParallelModel, cfg: OptimConfig) -> Optimizer: ...
@overload
def make_optimizer(model: ParallelModel, cfg: OptimConfig, kind: type[Kind]) -> Kind: ...


def make_optimizer(model: ParallelModel, cfg: OptimConfig, kind: type[Optimizer] = Optimizer) -> Optimizer:
    """Every rank calls it; patterns that match nothing or contradict each other are refused on all of them alike."""
    settings = settle(shapes_of(model.config, model.layout), cfg, width=width_of(model.config.hidden_size, cfg))
    mesh = model.mesh
    like = torch.empty(0, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    neighbours = mesh.group_of(mesh.ranks_along("tp", "cp", "dp"))
    return kind(model.views(), cfg, settings, neighbours, like, model.layout.offload)


@torch.no_grad()
def scale_initial(model: ParallelModel, cfg: OptimConfig) -> None:
    """The initial weights of muP; nothing without it."""
    width = width_of(model.config.hidden_size, cfg)
    for stage in model.stages.values():
        for view in stage.flat.held():
            view.weight.mul_(initial_factor(view.placed.name, view.placed.rule.shape, width))


def shapes_of(config: Any, layout: Layout) -> Mapping[str, Ints]:
    """Global names and shapes of the whole model's parameters, each once."""
    table = config.layout(layout.padded_vocab(config.vocab_size))
    return {name: table.rule(name).shape for name in global_names(config, layout)}
