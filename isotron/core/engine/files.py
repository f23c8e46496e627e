"""Checkpoints of an engine, in the one format of the core: loadable with any number of ranks and any stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn as nn

from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.load import Source, Wanted, load_tensors
from isotron.core.checkpoint.locate import find
from isotron.core.checkpoint.ranks import together
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.engine.held import Held
from isotron.core.errors import refuse
from isotron.core.layout import whole
from isotron.core.mesh import Group
from isotron.core.optim.optimizer import Optimizer
from isotron.core.optim.restore import load_slots
from isotron.core.precision.scaler import LossScaler

BUFFER = "buffer/"


class Saving(Protocol):
    """What of an engine is saved."""

    group: Group
    held: Held
    state: Optimizer
    scaler: LossScaler
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    global_steps: int
    skipped_steps: int
    micro_steps: int

    @property
    def module(self) -> nn.Module: ...


def _tensors(engine: Saving) -> Iterator[Saved]:
    for view in engine.held.saved_views():
        yield Saved(view.placed.name, view.weight.dtype, view.placed.rule.shape, list(view.pieces(view.weight)))
    for name, shape, dtype, pieces in engine.state.pieces():
        yield Saved(name, dtype, shape, pieces)
    for name, tensor in engine.module.named_buffers():
        first = [(whole(tensor.shape), tensor)] if engine.group.index == 0 else []
        yield Saved(BUFFER + name, tensor.dtype, tuple(tensor.shape), first)


def save(engine: Saving, directory: Path, client: dict[str, Any]) -> Path:
    """Every rank calls it."""
    schedule = engine.lr_scheduler
    meta = {
        "engine": {
            "updates": engine.state.updates,
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "micro_steps": engine.micro_steps,
            "scaler": engine.scaler.state(),
            "scheduler": schedule.state_dict() if schedule is not None else {},
            "rates": [group["lr"] for group in engine.optimizer.param_groups],
            "client": client,
        }
    }
    return save_checkpoint(directory, engine.global_steps, _tensors(engine), meta, GroupRanks(engine.group))


def load(engine: Saving, directory: Path) -> tuple[str, dict[str, Any]]:
    """Every rank calls it; (path, client state)."""
    ranks = GroupRanks(engine.group)
    found, _ = together(ranks, f"load from {directory}", lambda: find(str(directory), lambda _: None))
    if found is None:
        raise refuse(f"load_checkpoint({str(directory)!r})", "it holds no checkpoint", "the directory of a save")

    def read() -> dict[str, Any]:
        source = Source(found)
        state = source.manifest.meta.get("engine")
        if not isinstance(state, dict):
            raise refuse(f"load_checkpoint({str(found)!r})", "no engine has saved it", "a checkpoint of an engine")
        views = engine.held.kept_views()
        wanted = [Wanted(v.placed.name, list(v.pieces(v.weight, owned=False)), v.placed.rule.shape) for v in views]
        buffers = engine.module.named_buffers()
        wanted += [Wanted(BUFFER + name, [(whole(t.shape), t)], tuple(t.shape)) for name, t in buffers]
        load_tensors(source, wanted, ignore=lambda name: True)
        load_slots(engine.state, source)
        source.close()
        return state

    state, _ = together(ranks, f"load from {found}", read)
    engine.state.updates = int(state["updates"])
    engine.global_steps, engine.skipped_steps = int(state["global_steps"]), int(state["skipped_steps"])
    engine.micro_steps = int(state["micro_steps"])
    if engine.scaler.dynamic:
        engine.scaler = LossScaler(**state["scaler"])
    for group, rate in zip(engine.optimizer.param_groups, state["rates"], strict=True):
        group["lr"] = rate
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["scheduler"])
    return str(found), dict(state["client"])
