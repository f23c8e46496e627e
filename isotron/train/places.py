"""The directories that a run writes to: made, tried out and claimed before the first step.

A directory that cannot be written to would be found out by the first save, after hours of training. Two runs that write
into the same one would remove each other's unfinished saves, and one after the other its complete ones.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from errno import EACCES, EAGAIN
from pathlib import Path

from isotron.config.resume import cache_of
from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.checkpoint.format import read_manifest
from isotron.core.checkpoint.locate import is_complete, steps
from isotron.core.checkpoint.ranks import Ranks, together
from isotron.core.errors import Problem, Refused, refuse

SECONDS_TO_END = 10.0  # a run that was just killed may still be ending when the same command starts again


def keep_apart(given: CheckpointConfig, option: str, anew: bool) -> None:
    """Refuses a run that would save over the steps of another one; `option` has named the directory.

    A run may save where it was loaded from, whichever step that was, and where its copies elsewhere come from; not one
    that begins `anew`, at step 0 with the weights that it loads.
    """
    saves, load = given.save, given.load
    found = steps(Path(saves)) if os.path.isdir(saves) else []
    own = [Path(saves).resolve(), *([cache_of(given.remote_save).resolve()] if given.remote_save else [])]
    goes_on = bool(load) and not anew
    if not found or (goes_on and not {Path(load).resolve(), Path(load).resolve().parent}.isdisjoint(own)):
        return
    holds = f"{found[0].name} and {len(found) - 1} more" if len(found) > 1 else found[0].name
    other = next(name for n in range(2, 10**6) if not os.path.exists(name := f"{saves}-{n}"))
    asked = f"{option} {saves}" + (f" --load {load}" if load else "")
    case = (
        f"it holds {holds} of an earlier run, and this one does not go on from them: it would replace and remove them"
    )
    fix = f"{option} {shlex.quote(other)}"
    if _holds_a_run(found):
        there = shlex.quote(saves)
        verb = "isotron train " if given.finetune else ""
        fix = f"{verb}--load {there} {option} {there}, to go on with that run, or {fix}"
    raise refuse(asked, case, fix)


def _holds_a_run(found: list[Path]) -> bool:
    """Whether the newest complete step of these has more than weights, so that a run can go on from it."""
    newest = next((step for step in found if is_complete(step)), None)
    return newest is not None and not read_manifest(newest).meta.get("weights_only")


def try_out(places: dict[str, Path], inside: str = "") -> None:
    """Make each directory, or one `inside` it, and write to it; refuses all that cannot be written to, together."""
    problems = [p for option, path in places.items() for p in _unwritable(option, path, inside)]
    if problems:
        raise Refused(problems)


def claim(ranks: Ranks, places: dict[str, Path], stack: ExitStack) -> None:
    """Make each directory (option -> path) and keep others out until `stack` is closed; every rank calls it.

    Refused on all ranks: a directory that cannot be made or written to, or in which another run is writing.
    """

    def on_first() -> None:
        claimed: set[Path] = set()
        if ranks.rank == 0:
            try_out(places)
        for option, path in places.items() if ranks.rank == 0 else ():
            if path.resolve() not in claimed:
                _lock(option, path, stack)
                claimed.add(path.resolve())

    together(ranks, f"write to {', '.join(map(str, places.values()))}", on_first)


def _unwritable(option: str, path: Path, inside: str) -> list[Problem]:
    try:
        (path / inside).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path / inside) as probe:
            probe.write(b"0" * 4096)
            probe.flush()
    except OSError as error:
        case = f"nothing can be written there: {error.strerror or error}"
        return [Problem(f"{option} {path}", case, f"{option} with a directory that this user can write to")]
    return []


def _lock(option: str, path: Path, stack: ExitStack) -> None:
    """Lock the directory itself: the system lets go of it when the process ends, however it ends."""
    handle = os.open(path, os.O_RDONLY)
    stack.callback(os.close, handle)
    deadline = time.monotonic() + SECONDS_TO_END
    while not _locked(handle):
        if time.monotonic() > deadline:
            case = "another run is writing there at this moment"
            raise refuse(f"{option} {path}", case, f"{option} {path}-2, or wait for the other run to end")
        time.sleep(0.2)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (EAGAIN, EACCES)  # a file system without locks: two runs at once go unnoticed
    return True
