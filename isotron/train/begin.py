"""Beginning a run with weights that come from elsewhere: a Hugging Face directory, a converted model, another run.

Only weights are taken: the optimizer is new, the step is 0, the data begins at its start. The files that a model came
with (config.json, generation config, chat template) are carried on from checkpoint to checkpoint, for the way back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from isotron.core.checkpoint.format import read_manifest
from isotron.core.checkpoint.load import Loaded, Source
from isotron.core.checkpoint.partial import Renamed, parse_renames
from isotron.core.checkpoint.ranks import together
from isotron.core.checkpoint.weights import load_masters, load_weights
from isotron.core.device import dtype_of
from isotron.core.errors import listed
from isotron.core.optim.build import make_optimizer
from isotron.hub.folder import CONFIG, companions, is_folder
from isotron.hub.foreign import foreign_source, is_foreign, optimizer_left
from isotron.hub.opened import ORIGIN
from isotron.train.state import TrainState


def is_weights_only(step: Path) -> bool:
    """Whether a checkpoint was converted and has no optimizer state."""
    return bool(read_manifest(step).meta.get("weights_only"))


def begin(state: TrainState, path: Path, say: Callable[[str], None]) -> None:
    """Take the weights of a foreign checkpoint or of a step; every rank calls it."""

    wanted = state.config.checkpoint
    table = parse_renames(wanted.rename)
    left: list[str] = []

    def read() -> Loaded:
        if is_foreign(path):
            foreign = foreign_source(path, check_head=state.ranks.rank == 0)
            loaded = load_weights(state.model, Renamed(foreign, table) if table else foreign, strict=wanted.strict_load)
            foreign.close()
            left.append(optimizer_left(foreign))
            return loaded
        step = Source(path)
        source = Renamed(step, table) if table else step
        masters = state.model.dtype == dtype_of("float32") and any(n.startswith("master/") for n in source.names())
        loaded = load_weights(state.model, source, strict=wanted.strict_load)
        if masters:
            load_masters(state.model, source)
        step.close()
        return loaded

    loaded, _ = together(state.ranks, f"begin with the weights of {path}", read)
    if loaded.missing:
        say(f"isotron: not in {path}, as they were initialised: {listed(loaded.missing)}")
    if loaded.unexpected:
        say(f"isotron: in {path} and not in the model: {listed(loaded.unexpected)}")
    state.optimizer = make_optimizer(state.model, state.config.optim)  # its masters are the weights just read
    say(f"isotron: begun with the weights of {path}")
    if any(left) and not wanted.finetune:
        say(
            f"isotron: its optimizer's state is not taken ({left[0]}): isotron convert {path} DST --to isotron keeps it"
        )


def origin_files(path: Path | None, scratch: Path) -> dict[str, Path]:
    """Copies of what a model came with, by their place in a checkpoint; nothing when it was trained from the start."""
    if path is None or not path.is_dir():
        return {}
    if is_folder(path):
        found = [path / CONFIG, *companions(path)]
    else:
        found = sorted((path / ORIGIN).iterdir()) if (path / ORIGIN).is_dir() else []
    (scratch / ORIGIN).mkdir()
    for file in found:
        shutil.copyfile(file, scratch / ORIGIN / file.name)
    return {f"{ORIGIN}/{file.name}": scratch / ORIGIN / file.name for file in found}
