"""The weights of a model from any source of tensors, in whatever layout the model has: no optimizer state is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from isotron.core.checkpoint.load import Loaded, TensorSource, Wanted, load_tensors
from isotron.core.layout import Box, Table, whole
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout

OPTIMIZER = ("master/", "exp_avg/", "exp_avg_sq/", "exp_avg_sq_row/", "exp_avg_sq_col/", "momentum/")


def is_optimizer_state(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to the optimizer: masters and moments."""
    return name.startswith(OPTIMIZER)


def load_weights(model: ParallelModel, source: TensorSource, prefix: str = "", strict: bool = True) -> Loaded:
    """Fill every parameter of this rank's stages, replicas and the second owner of a tie included.

    Floating-point dtypes are converted to the model's. Names and shapes are compared for the whole model on every
    rank, so what is missing, unexpected or of another shape is refused on all of them alike, before any copy.
    `prefix`: "master/" reads the float32 masters as weights; tensors without the prefix are then left alone. Not
    `strict`: what is missing keeps its values, and is returned with what has no place.
    """
    model.wait_weights()
    buffers = {name for stage in model.stages.values() for name in stage.buffers} if prefix else ()
    wanted = [replace(w, name=prefix + w.name) for w in weights_wanted(model) if w.name not in buffers]
    others = is_optimizer_state if not prefix else lambda name: not name.startswith(prefix)
    return load_tensors(source, wanted, strict, others)


def load_masters(model: ParallelModel, source: TensorSource) -> None:
    """Fill the parameters from their masters where the source has them; what was frozen has none."""
    model.wait_weights()
    names = set(source.names())
    wanted = [replace(want, name="master/" + want.name) for want in weights_wanted(model)]
    load_tensors(source, [want for want in wanted if want.name in names], ignore=lambda name: True)


def weights_wanted(model: ParallelModel) -> list[Wanted]:
    """Every tensor of the whole model under its global name, with the regions that this rank holds, maybe none."""
    table: Table = model.config.layout(model.layout.padded_vocab(model.config.vocab_size))
    pieces: dict[str, list[tuple[Box, torch.Tensor]]] = {name: [] for name in global_names(model.config, model.layout)}
    for stage in model.stages.values():
        for view in stage.flat.held():
            pieces[view.placed.name] += view.pieces(view.weight, owned=False)
        for name, rule in stage.buffers.items():
            pieces[name] = [(whole(rule.shape), stage.module.get_buffer(name))]
    return [Wanted(name, found, table.rule(name).shape) for name, found in pieces.items()]


def global_names(cfg: Any, layout: Layout) -> Iterator[str]:
    """The names that a checkpoint of a model holds, each once, without memory for it."""
    padded = layout.padded_vocab(cfg.vocab_size)
    with torch.device("meta"):
        module = import_module(f"isotron.core.models.{cfg.family}").build(
            cfg, range(cfg.num_layers), True, True, padded
        )
    ties = cfg.layout(padded).ties
    aliases = {alias for alias, _ in ties}
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False) if name not in aliases)
    yield from (name for name, _ in module.named_buffers())
