"""Make a finished temporary directory the checkpoint of its step: rename, pointer, prune, in this order. PURE.

At every moment the run directory holds at least one complete checkpoint that `locate.find` finds. One process of a run
does this, the others wait.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from isotron.core.checkpoint.disk import sync_directory, write_blocks
from isotron.core.checkpoint.locate import LATEST, OLD, STEP, TEMPORARY, is_complete, steps


def temporary(run: Path, name: str) -> Path:
    """Where the step `name` is written before it is complete."""
    return run / f"{name}.tmp"


def clean_up(run: Path) -> None:
    """Remove what interrupted saves left; a step whose replacement was cut off gets its old version back."""
    for entry in sorted(run.iterdir()):
        if TEMPORARY.fullmatch(entry.name):
            _remove(entry)
        elif OLD.fullmatch(entry.name):
            step = entry.with_suffix("")
            if step.exists():
                _remove(entry)
            else:
                os.replace(entry, step)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def publish(run: Path, name: str, keep_last: int, keep_every: int = 0) -> Path:
    """Turn `NAME.tmp`, complete and synced, into `NAME`, point `latest` at it, and prune as `prune` says."""
    new, step, old = temporary(run, name), run / name, run / f"{name}.old"
    if step.exists():  # two renames; between them the old version is complete and found under its other name
        os.replace(step, old)
    os.replace(new, step)
    sync_directory(run)
    point(run, name)
    if old.exists():
        _remove(old)
    prune(run, step, keep_last, keep_every)
    return step


def point(run: Path, name: str) -> None:
    """Make `latest` name something in the run directory, at once or not at all."""
    pointer = run / f"{LATEST}.tmp"
    pointer.unlink(missing_ok=True)
    write_blocks(pointer, iter([f"{name}\n".encode()]))
    os.replace(pointer, run / LATEST)
    sync_directory(run)


def prune(run: Path, current: Path, keep_last: int, keep_every: int = 0) -> None:
    """Remove complete steps beyond the newest `keep_last` (0: keep all); `current` is always kept and counts as one.

    Steps that are a multiple of `keep_every` (0: none) are kept besides, and do not count.
    Damaged steps neither count nor go: somebody may want to look at them. A step is renamed before it is removed, so
    that a half-removed one is never taken for a damaged checkpoint.
    """
    others = [s.name for s in steps(run) if s != current]
    for name in reversed(superseded(others, keep_last, keep_every, lambda name: is_complete(run / name))):
        doomed = temporary(run, name)
        os.replace(run / name, doomed)
        _remove(doomed)


def superseded(others: list[str], keep_last: int, keep_every: int, complete: Callable[[str], bool]) -> list[str]:
    """The rule of `prune`, wherever steps lie: which of those beside the current one go; both newest first."""
    if keep_last < 1:
        return []
    return [name for name in others if not _stays(name, keep_every) and complete(name)][keep_last - 1 :]


def _stays(name: str, keep_every: int) -> bool:
    """Whether a directory is none of ours to remove, or one of the steps that are kept for good."""
    match = STEP.fullmatch(name)
    return match is None or (keep_every > 0 and int(match[1]) % keep_every == 0)
