"""Find what `--load` names, before any process starts. PURE.

A `--load` that finds nothing is refused, so that a mistyped path never trains from scratch; only a `--load` equal to
`--save` may find nothing yet: that is how one command both starts a run and continues it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotron.config.foreign import begun, foreign_run
from isotron.core.checkpoint.remote import fetch, is_remote
from isotron.core.errors import refuse


@dataclass(frozen=True)
class Found:
    """A checkpoint's directory, the run config saved in it, and its step; nothing when a new run starts.

    `weights_only`: it has no optimizer state, so a new run begins with its weights.
    """

    path: str = ""
    config: Mapping[str, Any] | None = None
    step: int = 0
    weights_only: bool = False


def find_checkpoint(load: str, save: str, log: Callable[[str], None] = print) -> Found:
    """The checkpoint that `--load` names: a run, a step, or one of another format (Hugging Face, the hub, Megatron).

    `Found()` when a new run may start.
    """
    if not load:
        return Found()
    if is_remote(load):
        fetched = fetch(load, cache_of(load), log)
        if fetched is None:
            case = "there is no complete checkpoint at this address, and a mistyped one must not train from scratch"
            raise refuse(f"--load {load}", case, "--load with the address of a run that has saved")
        load = str(fetched)
    foreign = _foreign(load, save)
    if foreign is not None:
        return foreign
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
    if manifest.meta.get("weights_only"):
        return Found(str(step), begun(config), manifest.step, weights_only=True)
    return Found(str(step), config, manifest.step)


def cache_of(url: str) -> Path:
    """Where checkpoints of an address are kept on this machine."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "isotron" / "remote" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _foreign(load: str, save: str) -> Found | None:
    """A Hugging Face directory or a Megatron checkpoint; None when `load` is something else."""
    from isotron.hub.foreign import is_foreign
    from isotron.hub.locate import is_hub_name, local_path

    if os.path.realpath(load) != os.path.realpath(save or "") and is_hub_name(load):
        load = str(local_path(load))
    if not is_foreign(load):
        return None
    return Found(load, foreign_run(load), 0, weights_only=True)
