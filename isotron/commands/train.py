"""`isotron train`: check everything, then start the processes of the layout, or join those of a launcher."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime

from isotron.commands.run_options import JSON, prepare, run_help, show_config, with_run_directory

MAIN = "isotron.train.main:main"


def run(words: Sequence[str]) -> int:
    """Train as the words say; returns the exit code."""
    from isotron.launch import from_environment, run_local

    prepared = prepare(words, JSON)
    world = from_environment()
    if world is None or world.rank == 0:
        for note in prepared.notes:
            print(f"note: {note}", file=sys.stderr)
    if prepared.flags.get("print_config"):
        print(show_config(prepared, bool(prepared.flags.get("json"))))
        return 0
    config = prepared.config
    if world is not None:  # one of a launcher's processes: rank 0 names the run directory, `main` tells the others
        return run_local(MAIN, 1, (config,))
    config = with_run_directory(config, datetime.now().strftime("%Y%m%d-%H%M%S"))
    return run_local(MAIN, config.layout.world, (config,))


def help_text() -> str:
    """The options of train."""
    order = (
        "flags override TOML, TOML overrides a checkpoint's config, that a preset; the last occurrence of a flag wins"
    )
    usage = f"isotron train [--config run.toml] [--OPTION VALUE ..]\n\n{order}"
    closing = "Under torchrun or Slurm the command joins the processes that exist; else it starts tp x pp x dp of them."
    return run_help(usage, JSON, closing)
