"""Find checkpoints in a run directory and check that their files are what the manifest says. PURE, and read-only.

A run directory holds `step_00000010/` (complete, by construction), `step_00000010.tmp/` (being written, or left by a
crash), for a moment `step_00000010.old/` (complete, about to be replaced), and the pointer file `latest`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isotron.core.checkpoint.format import MANIFEST, FileEntry, Manifest, read_manifest
from isotron.core.checkpoint.ranks import Ranks, together
from isotron.core.errors import Problem, Refused, refuse, shortened

LATEST = "latest"
STEP = re.compile(r"step_(\d{8,18})", re.ASCII)
OLD = re.compile(r"step_(\d{8,18})\.old", re.ASCII)
TEMPORARY = re.compile(r"(step_\d{8,18}|latest)\.tmp", re.ASCII)
BLOCK = 2**22

_warn = logging.getLogger(__name__).warning


def step_name(step: int) -> str:
    """Directory name of a step: `step_00000010`."""
    return f"step_{step:08d}"


def steps(run: Path) -> list[Path]:
    """Step directories of a run, newest first, complete or not; a step whose replacement was cut off as `.old`."""
    found: dict[int, Path] = {}
    for pattern in (OLD, STEP):  # in this order: the directory itself hides its old version
        for entry in run.iterdir():
            match = pattern.fullmatch(entry.name)
            if match and entry.is_dir():
                found[int(match[1])] = entry
    return [found[step] for step in sorted(found, reverse=True)]


@dataclass(frozen=True)
class Choice:
    """Step directories that `path` (a run or a step) may mean, the most wanted first; `named`: by `latest`."""

    path: Path
    steps: list[Path]
    named: Path | None


def find(path: str | Path, log: Callable[[str], None] = _warn, hashes: bool = False) -> Path | None:
    """The step directory to load from `path`, a run directory or a step directory; None if there is no checkpoint.

    A run gives the step that `latest` names, or, if that one is missing or damaged, the newest complete one, and says
    so through `log`. A step directory that is damaged, or a run in which every step is, is refused: a run must not
    start from scratch because its checkpoints are broken. `hashes` reads every byte; without it sizes are compared.
    On several ranks one of them decides and tells the others.
    """
    return first_whole(choice(path, log), log, lambda step: verify_files(step, hashes))


def choice(path: str | Path, log: Callable[[str], None] = _warn) -> Choice:
    """What there is to load from `path`, unchecked."""
    path = Path(path)
    if not path.is_dir():
        return Choice(path, [], None)
    if (path / MANIFEST).exists() or STEP.fullmatch(path.name):
        return Choice(path, [path], path)
    named, candidates = pointed_at(path, log), steps(path)
    if named in candidates:
        candidates.remove(named)
        candidates.insert(0, named)
    return Choice(path, candidates, named)


def first_whole(given: Choice, log: Callable[[str], None], check: Callable[[Path], object]) -> Path | None:
    """The first step that `check` does not refuse; refused with all that it found when it refuses every one."""
    damage: list[Problem] = []
    passed: list[str] = []  # said where another is found: a refusal says it itself
    for step in given.steps:
        try:
            check(step)
        except Refused as refusal:
            damage += refusal.problems
            passed.append(f"checkpoint {step} is not complete, looking for another: {refusal.problems[0].case}")
            continue
        for line in passed:
            log(line)
        if given.named != step:
            log(f"loading {step}, the newest complete checkpoint of {given.path}")
        return step
    if damage:
        raise Refused(damage)
    return None


def find_together(path: str | Path, ranks: Ranks, log: Callable[[str], None] = _warn) -> Path | None:
    """`find` as rank 0 sees the directory, with every file hashed by one of the ranks, which all call it."""

    def on_first() -> list[str]:
        found = choice(path, log) if ranks.rank == 0 else Choice(Path(path), [], None)
        return [*map(str, found.steps), "" if found.named is None else str(found.named)]

    seen, _ = together(ranks, f"load from {path}", on_first)
    *steps, named = ranks.broadcast_json(seen)
    given = Choice(Path(path), list(map(Path, steps)), Path(named) if named else None)
    share = ranks.rank, ranks.size
    return first_whole(
        given, log, lambda step: together(ranks, f"load from {step}", lambda: verify_files(step, share=share))
    )


def pointed_at(run: Path, log: Callable[[str], None] = _warn) -> Path | None:
    """The step directory that the file `latest` names, whether it exists or not; None without a usable pointer."""
    pointer = run / LATEST
    try:
        with pointer.open("rb") as f:
            name = f.read(64).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        log(f"{pointer} cannot be read: {error}")
        return None
    if not STEP.fullmatch(name):
        log(f"{pointer} holds {name!r}; it must name a step, for example {step_name(10)}")
        return None
    return run / name


def is_complete(path: Path) -> bool:
    """Whether the step directory has a valid manifest and every file of it in full size."""
    try:
        verify_files(path, hashes=False)
    except Refused:
        return False
    return True


def verify_files(path: str | Path, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Compare every file of a step directory with its manifest and return the manifest.

    Refuses with one problem per damaged file: its name, expected and found bytes or SHA-256. `share` = (rank, ranks)
    gives each of several processes its part of the hashing.
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = []
    for index, (name, entry) in enumerate(sorted(manifest.files.items())):
        case = file_error(path, name, entry, hashes and index % share[1] == share[0])
        if case:
            fix = "load another step of the same run, or copy this file again from where it came"
            problems.append(Problem(f"read the checkpoint {path}", case, fix))
    if problems:
        raise Refused(shortened(problems))
    return manifest


def file_error(path: Path, name: str, entry: FileEntry, hashed: bool) -> str | None:
    """What is wrong with one file of a step directory, its bytes compared with the hash if `hashed`; or None."""
    file = path / name
    try:
        file_inside(path, name)
        found = file.stat().st_size
        if found != entry.bytes:
            return f"file {name} is truncated or damaged: expected {entry.bytes} bytes, found {found}"
        digest = sha256_of(file) if hashed else entry.sha256
    except FileNotFoundError:
        return f"file {name} is missing: expected {entry.bytes} bytes, found no file"
    except OSError as error:
        return f"file {name} cannot be read: {error}"
    except Refused as refusal:
        return refusal.problems[0].case
    if digest != entry.sha256:
        return f"file {name} is damaged: expected SHA-256 {entry.sha256}, found {digest}"
    return None


def file_inside(path: Path, name: str) -> Path:
    """The file `name` of a step directory; refused if a link leads it out of the directory."""
    file = path / name
    if not file.resolve().is_relative_to(path.resolve()):
        raise refuse(
            f"read the checkpoint {path}",
            f"file {name} is a link that leaves the checkpoint's directory",
            "replace the link by the file itself; a link to the whole directory is fine",
        )
    return file


def sha256_of(file: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
