"""Find what `--load` names, before any process starts. PURE.

A `--load` that finds nothing is refused, so that a mistyped path never trains from scratch; only a `--load` equal to
`--save` may find nothing yet: that is how one command both starts a run and continues it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse


@dataclass(frozen=True)
class Found:
    """A checkpoint's directory, the run config saved in it, and its step; nothing when a new run starts."""

    path: str = ""
    config: Mapping[str, Any] | None = None
    step: int = 0


def find_checkpoint(load: str, save: str, log: Callable[[str], None] = print) -> Found:
    """The checkpoint that `--load` names, a run or a step directory; `Found()` when a new run may start."""
    if not load:
        return Found()
    from isotron.core.checkpoint.format import read_manifest
    from isotron.core.checkpoint.locate import find

    step = find(load, log)
    if step is None:
        if save and os.path.realpath(load) == os.path.realpath(save):
            log(f"{load} holds no checkpoint yet: a new run starts, and will save there")
            return Found()
        missing = "the directory holds no checkpoint" if Path(load).is_dir() else "there is no such directory"
        raise refuse(
            f"--load {load}",
            f"{missing}, and a mistyped path must not train from scratch",
            f"--load with a run or a step_XXXXXXXX directory, or --load {load} --save {load} to start a new run there",
        )
    manifest = read_manifest(step)
    config = manifest.meta.get("config")
    if not isinstance(config, Mapping):
        raise refuse(
            f"--load {load}",
            f"{step} was not written by isotron train: it holds no run config",
            "a checkpoint of a run",
        )
    return Found(str(step), config, manifest.step)
