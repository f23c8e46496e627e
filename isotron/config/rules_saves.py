"""Rules on checkpoints: where they go, how many stay, which one a fine-tuning begins with. PURE."""

from __future__ import annotations

import os

from isotron.config.rules import Facts, Rule, asked, flag, moved
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem

WORKS = {"save": "runs/first", "local_save": "/dev/shm/run"}


def _is_file(leaf: str) -> Rule:
    """A directory that is a file or a device would be found out by the first save."""

    def named(c: RunConfig) -> str:
        return str(getattr(c.checkpoint, leaf))

    def problem(c: RunConfig, f: Facts) -> Problem:
        case = "it is a file or a device, and checkpoints need a directory"
        return Problem(asked(c, leaf), case, f"{flag(leaf)} {WORKS[leaf]}")

    name = f"{leaf} is a directory"
    return Rule(name, (leaf,), lambda c, f: bool(named(c)) and f.is_file(named(c)), problem)


def _finetune_source(c: RunConfig, f: Facts) -> Problem:
    case = "it takes the weights of a model, and none is named"
    return Problem(asked(c, "finetune", "load"), case, "--load runs/first")


def _finetune_place(c: RunConfig, f: Facts) -> Problem:
    case = "the new run begins at step 0 and would write over the one that it begins with"
    return Problem(asked(c, "finetune", "load", "save"), case, f"--save {c.checkpoint.save}-finetuned")


def _keep_every(c: RunConfig, f: Facts) -> Problem:
    case = "it keeps checkpoints that keep_last would remove, and keep_last 0 removes none"
    return Problem(asked(c, "keep_every", "keep_last"), case, f"--keep-every {c.checkpoint.keep_every} --keep-last 2")


def _local_save(c: RunConfig, f: Facts) -> Problem:
    case = "a directory and how often belong together, more often than save_interval, which goes to save"
    fix = f"--local-save {c.checkpoint.local_save or '/dev/shm/run'} --local-save-interval 10"
    return Problem(asked(c, "local_save", "local_save_interval"), case, fix)


def _same(one: str, other: str) -> bool:
    """Whether two paths are given and are one place."""
    return bool(one and other) and os.path.realpath(one) == os.path.realpath(other)


def _local_place(c: RunConfig, f: Facts) -> Problem:
    case = "a copy on a node's own disk is kept beside the run's checkpoints, and both would go to one directory"
    return Problem(asked(c, "local_save", *moved(c, "save", "run_dir")), case, f"--local-save {WORKS['local_save']}")


def _node(c: RunConfig, f: Facts) -> Problem:
    ranks, world = c.checkpoint.local_save_ranks, c.layout.world
    case = f"{ranks} ranks would share a node, and the run has {world}"
    fix = f"--local-save-ranks {world}, or leave it out: as many as the launcher starts on each machine"
    return Problem(asked(c, "local_save_ranks"), case, fix)


SAVE_RULES: tuple[Rule, ...] = (
    _is_file("save"),
    _is_file("local_save"),
    Rule("fine-tuning needs weights", ("finetune", "load"),
         lambda c, f: c.checkpoint.finetune and not c.checkpoint.load, _finetune_source),
    Rule("fine-tuning goes elsewhere", ("finetune", "load", "save"),
         lambda c, f: c.checkpoint.finetune and _same(c.checkpoint.load, c.checkpoint.save), _finetune_place),
    Rule("kept beside the last", ("keep_every", "keep_last"),
         lambda c, f: c.checkpoint.keep_every > 0 and not c.checkpoint.keep_last, _keep_every),
    Rule("local saves", ("local_save", "local_save_interval"),
         lambda c, f: bool(c.checkpoint.local_save) != bool(c.checkpoint.local_save_interval), _local_save),
    Rule("local saves go elsewhere", ("local_save", "save", "run_dir"), 
         lambda c, f: _same(c.checkpoint.local_save, c.checkpoint.save or c.log.run_dir), _local_place),
    Rule("ranks of a node", ("local_save_ranks",),
         lambda c, f: c.checkpoint.local_save_ranks > c.layout.world, _node),
)  # fmt: skip
