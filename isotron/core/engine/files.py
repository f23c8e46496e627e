"""Checkpoints of an engine, in the one format of the core: loadable with any number of ranks and any stage."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn as nn

from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.load import Source, Wanted, load_tensors
from isotron.core.checkpoint.locate import LATEST, STEP, find_together
from isotron.core.checkpoint.publish import point
from isotron.core.checkpoint.ranks import together
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.engine.held import Held
from isotron.core.errors import Problem, Refused, refuse
from isotron.core.layout import whole
from isotron.core.mesh import Group
from isotron.core.optim.optimizer import Optimizer
from isotron.core.optim.restore import load_slots
from isotron.core.precision.scaler import LossScaler

BUFFER = "buffer/"
NAME = re.compile(r"(?!\.)[^/\\\x00\s]{1,200}")  # of one directory

_warn = logging.getLogger(__name__).warning


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


@dataclass(frozen=True)
class Parts:
    """What of a checkpoint is taken beside weights and their masters: moments, the schedule, counters."""

    moments: bool = False
    schedule: bool = False
    counters: bool = False


def refuse_parts(**asked: Any) -> None:
    """Options of DeepSpeed's that would make of a checkpoint less than what it is."""
    why = {
        "exclude_frozen_parameters": ("a checkpoint holds every weight", "leave it out"),
        "not_strict": ("every weight of the module comes from the checkpoint", "load_module_strict=True"),
        "custom_load_fn": ("tensors are read by their names", "leave it out, and change the module after it"),
    }
    found = [
        Problem(name.replace("not_strict", "load_module_strict=False"), *why[name]) for name in asked if asked[name]
    ]
    if found:
        raise Refused(found)


def save(engine: Saving, folder: Path, tag: str | int | None, client: dict[str, Any], latest: bool) -> Path:
    """Every rank calls it. A tag is a directory in `folder`, whose `latest` then names it."""
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
    ranks, name = GroupRanks(engine.group), _name(tag)
    if not name and not latest:
        case = "without a tag a checkpoint is a step of its directory, and the last of these is the latest"
        raise refuse("save_checkpoint(save_latest=False)", case, 'tag="aside"')
    saved = save_checkpoint(folder / name, engine.global_steps, _tensors(engine), meta, ranks)
    if name and latest:
        together(ranks, f"point at {folder / name}", lambda: point(folder, name) if ranks.rank == 0 else None)
    return saved


def _name(tag: str | int | None) -> str:
    """The directory of a tag; empty without one."""
    name = "" if tag is None else str(tag)
    if tag is not None and (not NAME.fullmatch(name) or STEP.fullmatch(name) or name == LATEST):
        case = "a tag names a directory, and this cannot be one of its own beside the steps without a tag"
        raise refuse(f"tag={tag!r}", case, 'tag="epoch-3"')
    return name


def _place(folder: Path, tag: str | int | None) -> Path:
    """Where the checkpoint that is meant lies: a tag's directory, also the one that `latest` names, or `folder`."""
    if tag is not None:
        return folder / str(tag) if STEP.fullmatch(str(tag)) else folder / _name(tag)
    pointer = folder / LATEST
    name = pointer.read_bytes()[:256].decode("utf-8", "replace").strip() if pointer.is_file() else ""
    tagged = NAME.fullmatch(name) and not STEP.fullmatch(name) and (folder / name).is_dir()
    return folder / name if tagged else folder


def load(engine: Saving, folder: Path, tag: str | int | None, parts: Parts) -> tuple[str | None, dict[str, Any] | None]:
    """Every rank calls it; (path, client state), or None for both where no tag is asked for and there is nothing."""
    ranks, asked = (
        GroupRanks(engine.group),
        f"load_checkpoint({str(folder)!r}{'' if tag is None else f', tag={tag!r}'})",
    )
    seen, _ = together(ranks, asked, lambda: str(_place(folder, tag)) if ranks.rank == 0 else None)
    found = find_together(ranks.broadcast_json(seen), ranks, _warn if ranks.rank == 0 else lambda _: None)
    if found is None and tag is None:
        if ranks.rank == 0:
            _warn(f"{asked}: there is no checkpoint, and nothing is loaded")
        return None, None
    if found is None:
        raise refuse(asked, "it holds no checkpoint", "a tag that was saved there, or none for the latest")

    def read() -> dict[str, Any]:
        source = Source(found)
        state = source.manifest.meta.get("engine")
        if not isinstance(state, dict):
            raise _not_of_an_engine(found, source)
        views = engine.held.kept_views()
        wanted = [Wanted(v.placed.name, list(v.pieces(v.weight, owned=False)), v.placed.rule.shape) for v in views]
        buffers = engine.module.named_buffers()
        wanted += [Wanted(BUFFER + name, [(whole(t.shape), t)], tuple(t.shape)) for name, t in buffers]
        advice = f"the module that was saved there; isotron inspect {found} lists its tensors and their shapes"
        load_tensors(source, wanted, ignore=lambda name: True, advice=advice)
        load_slots(engine.state, source, "" if parts.moments else "master/")
        source.close()
        return state

    state, _ = together(ranks, f"load from {found}", read)
    _take(engine, state, parts)
    return str(found), dict(state["client"])


def _not_of_an_engine(found: Path, source: Source) -> Refused:
    """What there is to do with a checkpoint that something else has saved."""
    asked = f"load_checkpoint({str(found)!r})"
    if "config" not in source.manifest.meta:
        return refuse(asked, "no engine has saved it", "a directory that save_checkpoint of an engine wrote to")
    fix = f"isotron train --load {found} goes on; isotron convert {found} DIR --to hf makes a model for transformers"
    return refuse(asked, "isotron train has saved it, with the names of its own models and optimizer", fix)


def _take(engine: Saving, state: Mapping[str, Any], parts: Parts) -> None:
    """Rates and counters of a checkpoint."""
    if parts.moments:
        engine.state.updates = int(state["updates"])
        for group, rate in zip(engine.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
    if parts.counters:
        engine.global_steps, engine.skipped_steps = int(state["global_steps"]), int(state["skipped_steps"])
        engine.micro_steps = int(state["micro_steps"])
        engine.scaler.go_on_from(LossScaler(**state["scaler"]))
    if parts.schedule and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["scheduler"])
