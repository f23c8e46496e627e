"""Ask a confined process where the tensors of a Megatron checkpoint lie; no pickle is opened here. PURE."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse
from isotron.core.layout import Box
from isotron.hub.megatron import assemble
from isotron.hub.megatron.stored import Chunk, Stored

TRACKER = "latest_checkpointed_iteration.txt"
LIMIT_S = 1000
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from isotron.hub.megatron.scan import main; sys.exit(main())"


@dataclass(frozen=True)
class Scanned:
    """`format`: torch_dist or torch. `args`: the arguments of the run that wrote it. `guards`: of the reading.

    `state`: how the optimizer's state is kept (see `state.kind_of`); `updates`: steps that the optimizer has done.
    """

    path: Path
    format: str
    args: Mapping[str, Any]
    iteration: int
    tensors: Mapping[str, Stored]
    guards: tuple[str, ...]
    state: str
    updates: int


def is_megatron(path: str | Path) -> bool:
    """Whether a directory is a Megatron checkpoint, or holds some."""
    where = Path(path).expanduser()
    return (where / TRACKER).is_file() or _is_step(where)


def _is_step(where: Path) -> bool:
    if not where.is_dir():
        return False
    return ((where / ".metadata").is_file() and (where / "common.pt").is_file()) or any(where.glob("mp_rank_*"))


def step_directory(path: str | Path) -> Path:
    """The directory of one checkpoint: the one given, or that which the tracker file names."""
    where = Path(path).expanduser()
    if _is_step(where):
        return where
    said = (where / TRACKER).read_text(encoding="utf-8").strip()
    step = where / (said if said == "release" else f"iter_{int(said):07d}" if said.isdecimal() else "")
    if step == where or not _is_step(step):
        case = f"{TRACKER} says {said!r}, and there is no checkpoint in {step.name}/"
        raise refuse(f"the Megatron checkpoint {path}", case, f"the directory of one step, {where}/iter_XXXXXXX")
    return step


def scan(step: Path, state: bool = False) -> Scanned:
    """What a checkpoint holds, with the optimizer's tensors where `state` asks for them.

    Refuses what is damaged, or names what no checkpoint needs.
    """
    answer = _ask(step, ["state"] if state else [])
    if "ranks" in answer:
        tensors = assemble.of_ranks(answer["ranks"], answer["args"] or {}, _place(step), str(step))
    else:
        tensors = {}
        for name, entry in answer["tensors"].items():
            tensors |= assemble.of_layers(name, tuple(entry["shape"]), [_chunk(step, c) for c in entry["chunks"]])
    iteration = int(answer["iteration"] or 0)
    updates = iteration if answer["updates"] is None else int(answer["updates"])
    return Scanned(step, answer["format"], answer["args"] or {}, iteration, tensors, tuple(answer["guards"]),
                   answer["state"], updates)  # fmt: skip


def _ask(step: Path, words: list[str]) -> dict[str, Any]:
    where = f"the Megatron checkpoint {step}"
    program = _PROGRAM.format(root=str(Path(__file__).resolve().parents[3]))
    command = [sys.executable, "-I", "-c", program, str(step.resolve()), *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False)
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise refuse(
            where, f"the process that reads it gave no answer ({type(error).__name__})", "a complete copy", 1
        ) from error
    if "unsafe" in answer:
        case = f"a pickle in it names {answer['unsafe']}, which no checkpoint needs; nothing of it was run"
        raise refuse(where, case, "a checkpoint from a source that you trust")
    if "damaged" in answer:
        raise refuse(where, f"it cannot be read: {answer['damaged']}", "a complete copy of the directory")
    found: dict[str, Any] = answer
    return found


def _place(step: Path) -> Any:
    """(file, first byte) as a path inside the checkpoint; anything else is refused."""

    def place(file: str, start: int) -> tuple[Path, int]:
        path = (step / file).resolve()
        if step.resolve() not in path.parents:
            raise refuse(f"the Megatron checkpoint {step}", f"it points to {file}, outside of it", "a complete copy")
        return path, int(start)

    return place


def _chunk(step: Path, entry: list[Any]) -> tuple[str, Chunk]:
    corner, dtype, shape, file, start = entry
    return dtype, Chunk(Box(tuple(corner), tuple(shape)), *_place(step)(file, start))
