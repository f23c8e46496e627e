"""From where a run goes on: its own directory, the nodes' own directories, or a model from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from isotron.config.schema import RunConfig
from isotron.core.checkpoint.format import MANIFEST, read_manifest
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.locate import find_together
from isotron.core.checkpoint.near import Near
from isotron.core.checkpoint.near_source import NearSource, find_near
from isotron.core.checkpoint.ranks import together
from isotron.core.errors import Refused, refuse
from isotron.hub.foreign import is_foreign
from isotron.launch import World
from isotron.train.begin import begin, is_weights_only
from isotron.train.nextloss import FILE as NEXT_LOSS
from isotron.train.nextloss import Facts, read_expected
from isotron.train.places import try_out
from isotron.train.state import TrainState, load_near, load_state

RUN_NAME = "local_run"  # file in the run directory: the name that its steps elsewhere carry


def nearby(
    config: RunConfig, saves: Path, world: World, apart: GroupRanks | None, say: Callable[[str], None]
) -> Near | None:
    """The nodes' own directories; None for a run without them. `apart`: a group that nothing uses meanwhile."""
    given = config.checkpoint
    if not given.local_save or apart is None:
        return None
    names = apart.gather_json(given.local_save_ranks or world.local_size)
    sizes = apart.broadcast_json(names)
    run = apart.broadcast_json(_run_name(saves) if apart.rank == 0 else None)
    near = Near(Path(given.local_save), run, max(sizes), apart.group)
    place = {"--local-save": near.directory}
    together(apart, f"save to {near.directory}", lambda: try_out(place, near.home.name) if near.leads else None)
    if not near.copies:
        case = "one node" if apart.size <= near.node_ranks else "nodes with unequal numbers of ranks"
        say(f"isotron: checkpoints in {given.local_save} have no copy on another node: {case}")
    return near


def _run_name(saves: Path) -> str:
    file = saves / RUN_NAME
    if not file.exists():
        saves.mkdir(parents=True, exist_ok=True)
        file.write_text(os.urandom(8).hex(), encoding="ascii")
    return file.read_text(encoding="ascii")


def resume(state: TrainState, near: Near | None, scratch: Path, say: Callable[[str], None]) -> Path | None:
    """Load the newest complete checkpoint of `load`, or only the weights where that is asked or there is no more.

    A run that goes on from its own directory takes a newer step that its nodes kept, and forgets what they have beyond
    it. Returns the directory that was loaded, or one in `scratch` with the further files of a step of the nodes. When
    `load` is also where checkpoints go and holds nothing, a run begins.
    """
    wanted = state.config.checkpoint
    own = bool(wanted.load and wanted.save) and Path(wanted.load).resolve() == Path(wanted.save).resolve()
    loaded = None if not wanted.load else _load(state, near if own else None, own, scratch, say)
    if near is not None:
        near.forget(state.step)
    return loaded


def _load(state: TrainState, near: Near | None, own: bool, scratch: Path, say: Callable[[str], None]) -> Path | None:
    wanted, ranks = state.config.checkpoint, state.ranks
    exists, foreign = ranks.broadcast_json([Path(wanted.load).exists(), is_foreign(wanted.load)])
    if foreign:
        begin(state, Path(wanted.load), say)
        return Path(wanted.load)
    found, damaged = _complete(state, near, say) if exists else (None, None)
    if found is not None and (wanted.finetune or is_weights_only(found)):
        begin(state, found, say)
        return found
    newer = None if near is None else find_near(near, -1 if found is None else read_manifest(found).step, say)
    where: Path | None = found
    if newer is not None:
        _whole(state)
        where = _load_newer(state, newer, scratch, say)
    elif found is not None:
        _whole(state)
        load_state(state, found)
    elif damaged is not None:
        raise damaged
    elif own:
        say(f"isotron: {wanted.load} holds no checkpoint yet, a new run begins")
        return None
    else:
        raise refuse(
            f"--load {wanted.load}",
            "there is no complete checkpoint",
            "the directory of a run that has saved, or leave --load out to start a new run",
        )
    place = found if newer is None else newer.path
    say(f"isotron: resumed from {place} at step {state.step}, {state.consumed_samples} samples consumed")
    return where


def _complete(state: TrainState, near: Near | None, say: Callable[[str], None]) -> tuple[Path | None, Refused | None]:
    """The newest complete checkpoint of `load`; the refusal where every one is damaged, but the nodes may have one."""
    wanted = state.config.checkpoint
    try:
        return find_together(wanted.load, state.ranks, say), None
    except Refused as refusal:  # the same on all ranks
        if near is None or wanted.finetune:
            raise
        return None, refusal


def _load_newer(state: TrainState, source: NearSource, scratch: Path, say: Callable[[str], None]) -> Path:
    """Resume from the nodes' directories; the further files go to `scratch`, in the first rank's as in a step."""
    place = scratch / source.path.name
    first = state.ranks.rank == 0
    if first:
        for name in source.files():
            source.file(name)  # noted, to be fetched with the rest
    received = state.ranks.gather_json(load_near(state, source))
    say(f"isotron: {sum(received or [0]):,} bytes of it came from other nodes")
    place.mkdir()
    for name in source.files() if first else ():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.file(name))
    next_loss = state.ranks.gather_json(source.beside(NEXT_LOSS))
    if first:
        (place / MANIFEST).write_bytes(source.manifest.dumps())
        for text in [found for found in next_loss or () if found is not None][:1]:
            (place / NEXT_LOSS).write_text(text, encoding="utf-8")
    source.close()
    return place


def _whole(state: TrainState) -> None:
    """Refuse options of a partial load for a run that is resumed with its optimizer state."""
    wanted = state.config.checkpoint
    if wanted.rename or not wanted.strict_load:
        asked = f"--rename {' '.join(wanted.rename)}" if wanted.rename else "--no-strict-load"
        case = "a run is resumed whole, with the optimizer state of every weight"
        raise refuse(f"{asked} --load {wanted.load}", case, "--finetune, to take the weights alone")


def first_loss(state: TrainState, loaded: Path | None) -> Facts | None:
    """What the first step must give, as rank 0 reads it; None where nothing is known or it is not to be compared."""
    wanted = loaded is not None and state.step > 0 and state.config.faults.resume_check
    if not wanted or loaded is None:
        return None
    found = read_expected(loaded, read_manifest(loaded).meta, state.config) if state.ranks.rank == 0 else None
    raw = state.ranks.broadcast_json(None if found is None else asdict(found))
    return None if raw is None else Facts(**raw)
