"""Checkpoints on storage that is no file system: copied there when complete, fetched before a run begins. PURE.

Any address that fsspec understands: `s3://bucket/run`, `gs://..`, `memory://run`; each needs its own package. There the
order is the same as on a disk: data files first, then the manifest, and the pointer last, so a step without a manifest
is not complete and is never taken. What was fetched is verified by its hashes before it gets its name.

Every storage has errors of its own, which leave this room as a Refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isotron.core.checkpoint.format import MANIFEST, read_manifest
from isotron.core.checkpoint.locate import LATEST, STEP, verify_files
from isotron.core.checkpoint.publish import superseded
from isotron.core.errors import Problem, Refused, refuse

# there an object needs no directory, and making one would make the bucket of a mistyped address
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"}


def is_remote(path: str) -> bool:
    """Whether this is an address rather than a path."""
    return "://" in path


def _opened(url: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    try:
        import fsspec

        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except Exception as error:
        fix = "a local path, or the package or account that the message names (for s3: pip install s3fs)"
        case = f"this address cannot be opened: {type(error).__name__}: {error}"
        raise refuse(f"checkpoints at {url}", case, fix) from error
    return system, str(root).rstrip("/")


def _make_room(system: Any, path: str) -> None:
    """The directory of a file to come, where storage has directories."""
    kinds = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
    if not kinds & _BUCKETS:
        system.makedirs(path, exist_ok=True)


def try_remote(url: str) -> None:
    """Write a small object to `url` and remove it; refuses an address that takes none, before it is needed."""
    system, root = _opened(url)
    if not root.strip("/"):
        raise refuse(f"--remote-save {url}", "it names no bucket or directory", "--remote-save s3://bucket/run")
    name = f"{root}/.try-{os.urandom(8).hex()}"
    try:
        _make_room(system, root)
        system.pipe_file(name, b"0")
        system.rm(name)
    except Exception as error:
        case = f"nothing can be written there: {type(error).__name__}: {error}"
        raise refuse(f"--remote-save {url}", case, "an address that this user may write to, or leave it out") from error


def push(step_dir: Path, url: str, keep_last: int = 0, keep_every: int = 0) -> str:
    """Copy a complete step to `url`, point `latest` at it, and prune there as on the disk; its address.

    Older steps whose copy was cut off go too. Refused where the storage fails; what was there before stays.
    """
    system, root = _opened(url)
    target = f"{root}/{step_dir.name}"
    with _stored(f"copy {step_dir.name} to {url}"):
        _copy(system, step_dir, target)
        system.pipe_file(f"{root}/{LATEST}", f"{step_dir.name}\n".encode())
        others = [name for name in _steps(system, root) if name != step_dir.name]
        whole = {name for name in others if _is_whole(system, f"{root}/{name}")}
        torn = [name for name in others if name not in whole and _number(name) < _number(step_dir.name)]
        for name in [*torn, *superseded(others, keep_last, keep_every, whole.__contains__)]:
            _remove(system, f"{root}/{name}")
    return target


@contextlib.contextmanager
def _stored(asked: str) -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        case = f"the storage says: {type(error).__name__}: {error}"
        raise refuse(asked, case, "try again, or use a local directory", exit_code=1) from error


def _copy(system: Any, step_dir: Path, target: str) -> None:
    """The files of a step, its manifest last; each is there in full size."""
    if system.exists(target):
        _remove(system, target)
    for name in [*sorted(read_manifest(step_dir).files), MANIFEST]:
        file = step_dir / name
        _make_room(system, f"{target}/{name}".rpartition("/")[0])
        system.put_file(str(file), f"{target}/{name}")
        size = system.info(f"{target}/{name}")["size"]
        if size != file.stat().st_size:
            raise OSError(f"{target}/{name} has {size} bytes after the copy, {file.stat().st_size} were sent")


def _remove(system: Any, step: str) -> None:
    if _is_whole(system, step):
        system.rm(f"{step}/{MANIFEST}")  # first: a half-removed step is not complete
    system.rm(step, recursive=True)


def fetch(url: str, cache: Path, log: Callable[[str], None]) -> Path | None:
    """Copy the newest whole step of the run at `url` (or the step that it names) into `cache`; None if there is none.

    A damaged step is passed over for the one before it, and `log` hears of it; refused when all are damaged.
    """
    system, root = _opened(url)
    last = root.rpartition("/")[2]
    damage: list[Problem] = []
    passed: list[str] = []  # said where another is found: a refusal says it itself
    named = [last] if STEP.fullmatch(last) else []
    asked = f"fetch a checkpoint from {url}"
    home = root.rpartition("/")[0] if named else root
    for name in named or _complete(system, root, asked):
        try:
            with _stored(asked):
                found = _fetched(system, f"{home}/{name}", cache / name)
        except Refused as refusal:
            damage += refusal.problems
            passed.append(f"checkpoint {url}/{name} is not whole, looking for another: {refusal.problems[0].case}")
            continue
        for line in passed:
            log(line)
        return found
    if damage:
        raise Refused(damage)
    return None


def _steps(system: Any, root: str) -> list[str]:
    """Names of the steps there, newest first, whole or not."""
    entries = system.ls(root, detail=False) if system.exists(root) else []
    names = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
    return sorted((name for name in names if STEP.fullmatch(name)), key=_number, reverse=True)


def _complete(system: Any, root: str, asked: str) -> Iterator[str]:
    """Names of the whole steps there, newest first; the storage is asked of no more than are taken."""
    with _stored(asked):
        names = _steps(system, root)
    for name in names:
        with _stored(asked):
            whole = _is_whole(system, f"{root}/{name}")
        if whole:
            yield name


def _number(name: str) -> int:
    return int(name.removeprefix("step_"))


def _is_whole(system: Any, step: str) -> bool:
    """Whether the step has a manifest, which is the last that is copied and the first that is removed."""
    return bool(system.exists(f"{step}/{MANIFEST}"))


def _fetched(system: Any, source: str, target: Path) -> Path:
    """The step in `target`, whole; what is there already is kept when it is the same checkpoint and whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        system.get_file(f"{source}/{MANIFEST}", str(scratch / MANIFEST))
        if target.is_dir() and (target / MANIFEST).read_bytes() == (scratch / MANIFEST).read_bytes():
            verify_files(target)
            return target
        for name in read_manifest(scratch).files:  # checked: relative, inside the directory
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{source}/{name}", str(scratch / name))
        verify_files(scratch)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(scratch, target)
        return target
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
