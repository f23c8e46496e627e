"""What it means for a run that a checkpoint cannot be written, place by place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.errors import Refused, refuse
from isotron.train.config import LogConfig
from isotron.train.copies import Copies
from isotron.train.destinations import Destination, NodeDirectories, RunDirectory
from isotron.train.faults import Watchdog
from isotron.train.metrics import Metrics
from isotron.train.saving import Saves


class Heard(Metrics):
    """Only the names of events."""

    def __init__(self) -> None:
        super().__init__(Path(), LogConfig(tensorboard=False), False, 0)
        self.names: list[str] = []

    def event(self, name: str, **fields: Any) -> None:
        self.names.append(name)


def made(tmp_path: Path, **given: Any) -> tuple[Saves, Heard]:
    cfg, heard, watch = CheckpointConfig(**given), Heard(), Watchdog(0.0)
    config = SimpleNamespace(checkpoint=cfg, train=SimpleNamespace(dtype="float32"))
    state: Any = SimpleNamespace(config=config, ranks=SimpleNamespace(rank=0), step=8, consumed_samples=8)
    forgotten: list[int] = []
    near: Any = SimpleNamespace(leads=True, forget=forgotten.append, forgotten=forgotten)
    far = RunDirectory(state, tmp_path, {}, heard, Copies(cfg, True, heard, watch))
    return Saves(state, far, watch, NodeDirectories(state, near, {}, heard)), heard


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, kind: type[Destination]) -> Iterator[None]:
    write = kind.write

    def failing(self: Destination, saver: Any) -> None:
        self.step = self.state.step
        raise refuse("save", "no room", "more room")

    monkeypatch.setattr(kind, "write", failing)
    yield
    monkeypatch.setattr(kind, "write", write)


@pytest.mark.parametrize(
    ("call", "kind", "policy", "ends", "events"),
    [
        ("save", RunDirectory, "stop", True, []),
        ("save", RunDirectory, "continue", False, ["save_failed"]),
        ("save_last", RunDirectory, "continue", True, []),
        ("save_near", NodeDirectories, "stop", False, ["local_save_failed"]),
        ("save_near", NodeDirectories, "continue", False, ["local_save_failed"]),
    ],
)
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, kind: Any, policy: str, ends: bool, events: list[str]
) -> None:
    saves, heard = made(tmp_path, on_save_failure=policy)
    with full_disk(monkeypatch, kind), pytest.raises(Refused) if ends else contextlib.nullcontext():
        getattr(saves, call)()
    assert heard.names == events
    assert saves.far.step == (8 if call == "save_last" else -1)
    assert saves.near is not None and saves.near.step == -1


def test_older_steps_are_removed_in_a_phase_of_the_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, phases, watch = CheckpointConfig(remote_save="memory://bucket/phases"), list[str](), Watchdog(0.0)
    monkeypatch.setattr("isotron.train.copies.push", lambda *_: "")
    monkeypatch.setattr("isotron.train.copies.prune", lambda *_: phases.append(watch.message()))
    copies = Copies(cfg, True, Heard(), watch)
    copies.begin(tmp_path / "step_00000001")
    copies.end()
    assert len(phases) == 1 and "(in: save)" in phases[0]


def test_a_place_beside_which_nothing_can_be_written_is_reported_and_a_run_that_went_back_asks_no_more(
    tmp_path: Path,
) -> None:
    saves, heard = made(tmp_path)
    assert saves.near is not None
    saves.near.step = saves.far.step = 8
    for place in (saves.far, saves.near):
        place.saved(tmp_path / "gone")
    saves.state.step = 9
    saves.after_step(0.5)
    assert heard.names == ["saved", "saved_locally", "next_loss_failed", "next_loss_failed"]
    saves.state.step = 4
    saves.gone_back()
    saves.state.step = 9
    saves.after_step(0.5)
    assert len(heard.names) == 4 and saves.near.near.forgotten == [4]  # type: ignore[attr-defined]
