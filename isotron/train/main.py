"""One rank of `isotron train`: from a finished config to a running loop.

Called in place for one process, by `launch.run_local` or by torchrun for several. Everything that `main` starts is torn
down again, so it can be called repeatedly in one process; `run` does the same in a process group of the caller.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotron.config.schema import RunConfig, changed, to_toml
from isotron.core import device as devices
from isotron.core.checkpoint.background import BackgroundSaver
from isotron.core.checkpoint.disk import free_bytes
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.ranks import together
from isotron.core.checkpoint.remote import try_remote
from isotron.core.checkpoint.save import SPARE_BYTES
from isotron.core.errors import refuse
from isotron.core.mesh import AXES, Mesh
from isotron.core.optim.build import make_optimizer, scale_initial
from isotron.core.parallel.model import ParallelModel
from isotron.core.peaks import peak_flops
from isotron.core.precision.scaler import LossScaler
from isotron.data.build import build_segments, count_sources
from isotron.data.masking import masking
from isotron.launch import World, from_environment, init_distributed, shutdown, stamp
from isotron.tokenizers.base import Tokenizer
from isotron.tokenizers.build import build_tokenizer
from isotron.train.announce import longer_lines, other_tokenizer_lines, start_lines
from isotron.train.begin import origin_files
from isotron.train.console import tell
from isotron.train.copies import Copies
from isotron.train.destinations import NodeDirectories, RunDirectory
from isotron.train.faults import NEVER_SECONDS, PHASE_FACTOR, Deadline, FiniteGuard, StopSignal, Watchdog
from isotron.train.feed import end_of
from isotron.train.injector import Injector
from isotron.train.judge import Judge
from isotron.train.loop import Measured, Run, train
from isotron.train.metrics import FILE, Metrics
from isotron.train.places import claim
from isotron.train.resume import first_loss, nearby, resume
from isotron.train.saving import Saves
from isotron.train.stacks import Stacks
from isotron.train.state import TrainState, state_bytes

Tasks = Callable[[RunConfig, ParallelModel], Callable[[], Sequence[Measured]]]


def main(config: RunConfig, run_dir: str, tasks: Tasks | None = None) -> int:
    """Train as `config` says, on this rank; returns the exit code. `run_dir`: of metrics, and of saves by default.

    `tasks` makes of config and model what each evaluation measures beside the loss.
    """
    world = from_environment() or World()
    device = devices.resolve(config.train.device, world.local_rank)
    init_distributed(world, device, collective_timeout(config.train.stuck_after_s))
    try:
        return run(config, run_dir, world, tasks)
    except BaseException as error:
        stamp(error)
        raise
    finally:
        shutdown()


def run(config: RunConfig, run_dir: str, world: World, tasks: Tasks | None = None) -> int:
    """`main` in a default process group that exists already and stays; so do the groups made for the layout's axes."""
    device = devices.resolve(config.train.device, world.local_rank)
    # before all else: a signal while the run is built stops it after its first step, and building may hang too
    with StopSignal(device) as stop, Watchdog(config.train.stuck_after_s, world.rank) as watchdog, ExitStack() as stack:
        with watchdog.phase("start"):
            ready = _prepare(config, Path(run_dir), world, device, stop, watchdog, stack)
            if tasks is not None:
                ready.tasks = tasks(ready.state.config, ready.state.model)
        return train(ready)


def collective_timeout(stuck_after_s: float) -> float:
    """Seconds that a collective may wait: the watchdog, which says what is stuck, must be first in any phase."""
    return (PHASE_FACTOR + 1) * stuck_after_s if stuck_after_s else NEVER_SECONDS


def _prepare(
    given: RunConfig,
    directory: Path,
    world: World,
    device: Any,
    stop: StopSignal,
    watchdog: Watchdog,
    stack: ExitStack,
) -> Run:
    """Model, checkpoint, data and what watches over them, in this order."""
    say: Callable[[str], None] = tell if world.rank == 0 else lambda _: None
    mesh = Mesh(world.rank, **given.layout.axes)
    everyone = GroupRanks(mesh.group(*AXES))
    tokenizer, config = together(everyone, "the tokenizer", lambda: _words(given, say))[0]
    state = _built(config, mesh, device, say)
    saves = Path(config.checkpoint.save or directory)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    apart = (
        GroupRanks(state.model.mesh.apart()) if config.checkpoint.async_save or config.checkpoint.local_save else None
    )
    near = nearby(config, saves, world, apart, say)
    loaded = resume(state, near, scratch, say)
    before, state.segments = state.segments, extended(state.segments, needed_samples(state))
    for line in longer_lines(before, state.segments):
        say(f"isotron: {line}")
    for line in other_tokenizer_lines(tokenizer, loaded):
        say(f"isotron: {line}")
    _take_places(state, directory, saves, world, stack)
    stacks = Stacks(directory / "stacks", world.rank)
    stack.enter_context(stacks.listening(everyone))
    watchdog.survey = stacks.collect

    def data() -> tuple[Any, Any]:
        return together(everyone, "the data", lambda: datasets(state, tokenizer, say))[0]

    train_data, valid_data = data()
    files = {**tokenizer_files(tokenizer, scratch), **origin_files(loaded, scratch)}
    metrics = _metrics(state, directory, world, device, stack)
    say(f"isotron: metrics in {directory / FILE}")
    injector = Injector(config.faults.inject, world.rank, directory)
    copies = Copies(config.checkpoint, world.rank == 0, metrics, watchdog)
    far = RunDirectory(state, saves, files, metrics, copies, injector.before_save)
    if loaded is not None and loaded.resolve().parent == saves.resolve():
        far.step = state.step
    nodes = None if near is None else NodeDirectories(state, near, files, metrics)
    where = Saves(state, far, watchdog, nodes, background(config, apart, stack), first_loss(state, loaded))
    judge = Judge(config.faults, state.recent, where.wait_staged, state.scaler)

    def rebuild() -> tuple[Any, Any]:
        state.segments = extended(state.segments, needed_samples(state))
        return data()

    guard, deadline = FiniteGuard(state.skipped, state.nan), Deadline(config.faults.exit_duration_in_mins)
    eod = None if tokenizer is None else tokenizer.eod
    reporting = (metrics, stop, watchdog, guard, judge, injector, deadline)
    return Run(state, train_data, valid_data, eod, where, *reporting, rebuild)


def _words(config: RunConfig, say: Callable[[str], None]) -> tuple[Tokenizer | None, RunConfig]:
    """The tokenizer, and the config with its vocabulary size."""
    tokenizer = _tokenizer(config, say)
    return tokenizer, with_vocabulary(config, tokenizer)


def _built(config: RunConfig, mesh: Mesh, device: Any, say: Callable[[str], None]) -> TrainState:
    """Step 0: this rank's part of the model with its first weights, and its optimizer."""
    dtype = devices.dtype_of(config.train.dtype)
    model = ParallelModel(config.model, config.layout, mesh, dtype, device, config.train.seed, config.optim.freeze)
    scale_initial(model, config.optim)
    optimizer = make_optimizer(model, config.optim)
    for line in start_lines(config, model, mesh.size):
        say(f"isotron: {line}")
    return TrainState(config, model, optimizer, LossScaler.for_run(config.train.dtype, config.optim))


def _take_places(state: TrainState, directory: Path, saves: Path, world: World, stack: ExitStack) -> None:
    """The directories of this run, which no other may write to and where what it saves must fit."""
    claim(state.ranks, {"--run-dir": directory, "--save": saves}, stack)
    far = state.config.checkpoint.remote_save
    together(state.ranks, f"copies at {far}", lambda: try_remote(far) if far and world.rank == 0 else None)
    check_space(state, saves)


def _metrics(state: TrainState, directory: Path, world: World, device: Any, stack: ExitStack) -> Metrics:
    """The run's record, begun, and its config beside it."""
    config, layout = state.config, state.config.layout
    if world.rank == 0:
        (directory / "config.toml").write_text(to_toml(config), encoding="utf-8")
    metrics = Metrics(directory, config.log, world.rank == 0, state.step)
    stack.callback(metrics.close)
    peak = peak_flops(devices.device_name(device), config.train.dtype)
    facts = {**asdict(layout), "schedule": layout.schedule_name}
    ranks = state.model.mesh.size
    metrics.start(state.step, config.train.train_iters, ranks, facts, peak, (state.skipped, state.nan))
    return metrics


def background(config: RunConfig, apart: GroupRanks | None, stack: ExitStack) -> BackgroundSaver | None:
    """What saves in the background, on the group `apart`; None where saves are waited for."""
    if not config.checkpoint.async_save or apart is None:
        return None
    saver = BackgroundSaver(apart)
    stack.callback(saver.close)
    return saver


def _tokenizer(config: RunConfig, say: Callable[[str], None]) -> Tokenizer | None:
    given = config.tokenizer
    if config.data.mock_data and not (given.tokenizer_model or given.vocab_file):
        return None
    tokenizer = build_tokenizer(given, config.model.vocab_size)
    for line in tokenizer.notes:
        say(f"isotron: {line}")
    return tokenizer


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """The config with the vocabulary size that the tokenizer has, where none was given."""
    if tokenizer is None:
        return config
    size = config.model.vocab_size or tokenizer.vocab_size
    if size < tokenizer.vocab_size:
        raise refuse(
            f"--vocab-size {size}",
            f"the tokenizer has {tokenizer.vocab_size} entries",
            f"--vocab-size {tokenizer.vocab_size}, or leave it out",
        )
    return changed(config, vocab_size=size)


def needed_samples(state: TrainState) -> int:
    """Samples from the start of the data order to the end of this run; the global batch may have changed on the way."""
    train = state.config.train
    return end_of(train, state.consumed_samples, train.train_iters - state.step)


def extended(segments: list[int], needed: int) -> list[int]:
    """Sample counts of the data order: a longer run appends to the order of the run it continues."""
    missing = needed - sum(segments)
    return [*segments, missing] if missing > 0 or not segments else list(segments)


def datasets(state: TrainState, tokenizer: Tokenizer | None, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Training data in the order that the checkpoint froze, and validation data."""
    cfg, train = state.config, state.config.train
    held_out = train.eval_iters * train.global_batch_size
    vocab, consumed = cfg.model.vocab_size, state.consumed_samples
    before, state.sources = state.sources, count_sources(cfg.data)
    if consumed and before and before != state.sources:
        then, now = (" + ".join(f"{d:,} documents with {t:,} tokens" for d, t in c) for c in (before, state.sources))
        say(f"isotron: the data is not what this run has read so far: {then} then, {now or 'made-up data'} now")
    eod = None if tokenizer is None else tokenizer.eod
    known: dict[str, Any] = {"vocab_size": vocab, "eod": eod, "tokenizer": tokenizer}
    known["masking"] = masking(cfg.data, cfg.model, tokenizer)
    return build_segments(cfg.data, train.seed, state.segments, held_out, say, consumed=consumed, **known)


def check_space(state: TrainState, directory: Path) -> None:
    """Refuse at start, on all ranks, when not even one checkpoint fits on the disk of any, with the room that saving
    wants to leave.
    """
    model = state.model
    size = model.count_parameters() * model.dtype.itemsize + state_bytes(state)

    def on_each() -> None:
        where = next(p for p in (directory, *directory.resolve().parents) if p.exists())
        free = free_bytes(where)
        if free < size + SPARE_BYTES:
            spare = f"{SPARE_BYTES / 1e9:.3f} GB are to stay free"
            raise refuse(
                f"checkpoints in {directory}",
                f"one takes {size / 1e9:.3f} GB, {spare}, and {free / 1e9:.3f} GB are free",
                "--save with a directory on a larger disk, or free some space",
            )

    together(state.ranks, f"checkpoints in {directory}", on_each)


def tokenizer_files(tokenizer: Tokenizer | None, scratch: Path) -> dict[str, bytes | Path]:
    """The tokenizer's files as they go into a checkpoint: `tokenizer/NAME`."""
    if tokenizer is None:
        return {}
    tokenizer.save(scratch)
    return {f"tokenizer/{p.name}": p for p in sorted(scratch.iterdir())}
