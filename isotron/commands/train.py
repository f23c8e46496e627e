"""`isotron train`: check everything, then start the processes of the layout, or join those of a launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from isotron.commands import dry_run
from isotron.commands.run_options import JSON, device_count, prepare, run_help, show_config
from isotron.config.catalogue import Option
from isotron.config.schema import RunConfig, changed
from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.checkpoint.locate import LATEST, is_complete, steps
from isotron.core.errors import Refused, refuse
from isotron.core.host import available_memory
from isotron.evaluate.tasks import problems_of
from isotron.exits import EXIT_SIGNALLED
from isotron.launch import World, from_environment, run_local, started_again
from isotron.planner.advice import contradictions, warnings
from isotron.planner.fit import memory_problem
from isotron.planner.job import Job
from isotron.train.places import keep_apart, try_out

OWN = {
    "build_index": Option(
        "build_index", "bool", False, "only build the indexes of the data, for a run that starts later"
    ),
    **dry_run.OPTIONS,
    **JSON,
}
MAIN = "isotron.commands.train_rank:main"


def run(words: Sequence[str]) -> int:
    """Train as the words say; returns the exit code."""
    if dry_run.is_meant(words):
        return dry_run.run(words, OWN)
    prepared = prepare(words, OWN)
    problems = problems_of(prepared.config.train.eval_tasks)
    if problems:
        raise Refused(problems)
    world = from_environment()
    starts = not {"print_config", "build_index"} & {name for name, value in prepared.flags.items() if value}
    if world is None or world.rank == 0:
        for note in prepared.notes if starts else (*prepared.sought, *prepared.notes):
            print(f"note: {note}", file=sys.stderr)
        for text in advice(prepared.config, device_count(prepared.config.train.device), world):
            print(f"warning: {text}", file=sys.stderr)
    if prepared.flags.get("print_config"):
        print(show_config(prepared, bool(prepared.flags.get("json"))))
        return 0
    if prepared.flags.get("build_index"):
        from isotron.commands.build_index import build_index

        return build_index(prepared.config)
    check_memory(prepared.config, world)
    config, directory = with_directories(prepared.config, world)
    config = going_on(config, world is not None and started_again())
    asked = prepared.config
    again = config.checkpoint.load != asked.checkpoint.load  # see going_on
    anew = config.checkpoint.finetune or (prepared.resumed.weights_only and not again)
    keep_apart(config.checkpoint, "--save" if asked.checkpoint.save else "--run-dir", anew)
    if world is None:
        given = {"--run-dir": asked.log.run_dir, "--save": asked.checkpoint.save}
        given = given if any(given.values()) else {"--save": directory}
        given["--local-save"] = asked.checkpoint.local_save
        try_out({option: Path(path) for option, path in given.items() if path})
        return _started(config, directory)
    return run_local(MAIN, 1, (config, directory))


def _started(config: RunConfig, directory: str) -> int:
    """The run on processes of this machine; one that ends before its time says from where it can go on."""
    code = 1
    try:
        code = run_local(MAIN, config.layout.world, (config, directory))
    except Refused as refusal:
        code = 0 if refusal.exit_code == 2 else 1  # one that can be asked better says itself how
        raise
    finally:
        if code not in (0, EXIT_SIGNALLED):
            print(f"isotron: {left_behind(config.checkpoint)}", file=sys.stderr, flush=True)
    return code


def left_behind(given: CheckpointConfig) -> str:
    """What there is to go on from in the directory of saves."""
    save = given.save
    last = next((step for step in (steps(Path(save)) if os.path.isdir(save) else []) if is_complete(step)), None)
    if last is None:
        return f"nothing was saved: {save} holds no checkpoint"
    there = f"--load {shlex.quote(save)} --save {shlex.quote(save)}"
    how = f"isotron train {there}" if given.finetune else f"the same command with {there}"
    return f"the last checkpoint is {last}; {how} goes on from there"


def check_memory(config: RunConfig, world: World | None) -> None:
    """Refuse a run whose state and activations are larger than the memory that is free, on the CPU or on a device."""
    devices = device_count(config.train.device)
    processes = config.layout.world if world is None else world.local_size
    if devices:
        from isotron.core import device

        free: float | None = device.total_memory(device.resolve("auto"))
    else:
        free = available_memory()
    problem = None if free is None else memory_problem(config, free, not devices, processes)
    if problem is not None:
        raise Refused([problem])


def advice(config: RunConfig, devices: int, world: World | None) -> list[str]:
    """What deserves a warning about the layout on this many accelerators per machine; on CPUs what makes no sense."""
    if not devices or config.layout.world == 1:
        return contradictions(Job.of(config))
    node = devices if world is None else max(devices, world.local_size)
    return warnings(Job.of(config), node)


def with_directories(config: RunConfig, world: World | None) -> tuple[RunConfig, str]:
    """The config with `save` filled in, and the run directory; every rank of a launcher comes to the same names."""
    run = config.log.run_dir or config.checkpoint.save or f"runs/{_run_name(world)}"
    return changed(config, run_dir=run, save=config.checkpoint.save or run), run


def going_on(config: RunConfig, again: bool) -> RunConfig:
    """The config of a job that its launcher has started `again`: it resumes from its own checkpoints, if it has any."""
    save = config.checkpoint.save
    if not again or (config.checkpoint.load and not os.path.exists(os.path.join(save, LATEST))):
        return config
    return changed(config, load=save, finetune=False, rename=(), strict_load=True)


def _run_name(world: World | None) -> str:
    if world is None:
        return datetime.now().strftime("%Y%m%d-%H%M%S")
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job != "none":
        return f"job-{job}"
    if world.local_size < world.size:
        raise refuse(
            "several machines, without --save or --run-dir",
            "every process must come to the same run directory, and no job number names it",
            "--save runs/NAME on a file system that all machines share",
        )
    return f"torchrun-{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}"  # the launcher is the parent of all ranks


def help_text() -> str:
    """The options of train."""
    order = (
        "flags override TOML, TOML overrides a checkpoint's config, that a preset; the last occurrence of a flag wins"
    )
    usage = f"isotron train [--config run.toml] [--OPTION VALUE ..]\n\n{order}"
    closing = (
        "Under torchrun or Slurm the command joins the processes that exist; else it starts tp x pp x cp x dp of them."
    )
    return run_help(usage, OWN, closing)
