"""What a run is made of, and how it is saved and resumed: weights, masters, moments, counters, data position.

Tensors are saved under global names: `NAME` for weights, `master/NAME`, `exp_avg/NAME`, `momentum/NAME` and so on for
optimizer state, each element by one rank. Everything else is a few numbers in the manifest. No random state exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from isotron.config.schema import RunConfig, to_dict
from isotron.core import comm
from isotron.core.checkpoint.background import BackgroundSaver
from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.near import Near, as_tensors
from isotron.core.checkpoint.near_source import NearSource
from isotron.core.checkpoint.ranks import together
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.checkpoint.weights import load_masters, load_weights
from isotron.core.errors import Refused, refuse
from isotron.core.mesh import AXES
from isotron.core.optim.optimizer import Optimizer
from isotron.core.optim.restore import load_slots
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.replicas import unequal_replicas
from isotron.core.precision.scaler import LossScaler


@dataclass
class TrainState:
    """A run in progress.

    segments: the sample counts that the data order was built for, oldest first. sources: [documents, tokens] of each
    dataset that training reads; after loading, what the saved run read. recent: losses that spikes are measured
    against. rewinds: how often the run has gone back. nan: steps whose loss was not finite.
    """

    config: RunConfig
    model: ParallelModel
    optimizer: Optimizer
    scaler: LossScaler
    step: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    segments: list[int] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    rewinds: int = 0
    nan: int = 0

    @property
    def schedule(self) -> ScheduleConfig:
        """The schedule with its length filled in: it ends with the run unless told otherwise."""
        given = self.config.schedule
        return replace(given, lr_decay_iters=given.lr_decay_iters or self.config.train.train_iters)

    @property
    def ranks(self) -> GroupRanks:
        """The world, as checkpoints see it."""
        return GroupRanks(self.model.mesh.group(*AXES))


def saved_tensors(state: TrainState) -> Iterator[Saved]:
    """This rank's part of a checkpoint."""
    for name, shape, pieces in state.model.weight_pieces():
        yield Saved(name, state.model.dtype, shape, pieces)
    for name, shape, pieces in state.model.buffer_pieces():
        yield Saved(name, state.model.wide, shape, pieces)
    for name, shape, dtype, pieces in state.optimizer.pieces():
        yield Saved(name, dtype, shape, pieces)


def save_state(state: TrainState, directory: Path, files: dict[str, bytes | Path]) -> Path:
    """Save a checkpoint of this step; every rank calls it. Returns its directory."""
    tensors, meta = saved_tensors(state), saved_meta(state)
    last, every = _kept(state.config.checkpoint)
    return save_checkpoint(directory, state.step, tensors, meta, state.ranks, last, files, every)


def start_save(state: TrainState, directory: Path, files: dict[str, bytes | Path], saver: BackgroundSaver) -> None:
    """Begin to save this step in the background; every rank calls it."""
    tensors, meta = list(saved_tensors(state)), saved_meta(state)
    saver.start(directory, state.step, tensors, meta, *_kept(state.config.checkpoint), files)


def _kept(given: CheckpointConfig) -> tuple[int, int]:
    """`keep_last` and `keep_every` of a save; none goes in a run with copies: one may be under way (`Copies`)."""
    return (0, 0) if given.remote_save else (given.keep_last, given.keep_every)


def save_near(
    state: TrainState, near: Near, files: dict[str, bytes | Path], saver: BackgroundSaver | None
) -> Path | None:
    """Save this step in the nodes' own directories, or begin to where there is a `saver`; every rank calls it."""
    step, meta = state.step, saved_meta(state)
    tensors = [*saved_tensors(state), *as_tensors(files, near.ranks)]
    if saver is None:
        return near.save(step, tensors, meta)
    saver.begin(step, tensors, lambda placed: near.save(step, placed, meta))
    return None


def saved_meta(state: TrainState) -> dict[str, Any]:
    """What the manifest holds beside tensors: the config, counters and the data position."""
    return {
        "config": to_dict(state.config),
        "updates": state.optimizer.updates,
        "scaler": state.scaler.state(),
        "consumed_samples": state.consumed_samples,
        "skipped": state.skipped,
        "segments": list(state.segments),
        "sources": list(state.sources),
        "recent": list(state.recent),
        "rewinds": state.rewinds,
        "nan": state.nan,
    }


def state_bytes(state: TrainState) -> int:
    """Bytes of optimizer state in a checkpoint, over all ranks."""
    parts = (t for *_, pieces in state.optimizer.pieces() for _, t in pieces)
    total = torch.tensor(sum(t.nbytes for t in parts), device=state.model.device)
    return int(comm.all_reduce(total, state.ranks.group))


def load_state(state: TrainState, step_dir: Path) -> None:
    """Resume from a checkpoint of any layout, with optimizer state; every rank calls it."""

    def read() -> None:
        source = Source(step_dir)
        _take(state, source)
        source.close()

    together(state.ranks, f"resume from {step_dir}", read)
    _compare_replicas(state, step_dir)


def load_near(state: TrainState, source: NearSource) -> int:
    """Resume from the nodes' own directories, in any layout; every rank calls it. Bytes that came from other nodes."""
    asked = f"resume from {source.path}"
    together(state.ranks, asked, lambda: _read_tensors(state, source))  # notes what has to be fetched
    received = source.fetch()
    together(state.ranks, asked, lambda: _take(state, source))
    _compare_replicas(state, source.path)
    return received


def _take(state: TrainState, source: Source) -> None:
    _read_tensors(state, source)
    state.step = source.manifest.step
    _load_counters(state, source.manifest.meta, source.path)


def _read_tensors(state: TrainState, source: Source) -> None:
    load_weights(state.model, source)
    _load_optimizer(state, source)


def _compare_replicas(state: TrainState, step_dir: Path) -> None:
    differing = unequal_replicas(state.model)
    if differing:
        raise refuse(
            f"resume from {step_dir}",
            f"after loading, ranks hold different values of {', '.join(differing)}",
            "load another step; this one is damaged or this is a fault of the program",
            exit_code=1,
        )


def _load_counters(state: TrainState, meta: dict[str, Any], step_dir: Path) -> None:
    """Position and counts; refused where they cannot be what a run has saved."""
    try:
        updates, consumed, skipped = (int(meta[name]) for name in ("updates", "consumed_samples", "skipped"))
        segments = [int(n) for n in meta["segments"]]
        sources = [[int(n) for n in pair] for pair in meta.get("sources", [])]  # older checkpoints have none
        recent = [float(x) for x in meta.get("recent", [])]
        rewinds, nan = int(meta.get("rewinds", 0)), int(meta.get("nan", 0))
        scaler = LossScaler(**meta["scaler"])
    except (KeyError, TypeError, ValueError) as error:
        raise _no_counters(step_dir, f"they cannot be read: {type(error).__name__} {error}") from error
    if min(updates, consumed, skipped) < 0 or any(n < 1 for n in segments) or consumed > sum(segments):
        found = f"updates {updates}, consumed_samples {consumed}, skipped {skipped}, segments {segments}"
        raise _no_counters(step_dir, f"{found}: none is negative, and segments hold the consumed samples")
    state.optimizer.updates, state.consumed_samples, state.skipped = updates, consumed, skipped
    state.segments, state.sources = segments, sources
    state.recent, state.rewinds, state.nan = recent, rewinds, nan
    state.scaler.go_on_from(scaler)


def _no_counters(step_dir: Path, case: str) -> Refused:
    fix = "load another step of the run, or convert this one's weights and begin a new run with them"
    return refuse(f"resume from {step_dir}", f"the counters under meta in manifest.json: {case}", fix)


def _load_optimizer(state: TrainState, source: Source) -> None:
    names = set(source.names())
    load_slots(state.optimizer, source)
    # a float32 run that resumes from a 16-bit one goes on from the masters, which are its weights
    if not state.optimizer.own_masters and any(n.startswith("master/") for n in names):
        load_masters(state.model, source)
