"""Saving while training goes on: the copies, the wait, the order of things, and failures that all ranks hear of."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from isotron.core.checkpoint import save, staging
from isotron.core.checkpoint.background import BackgroundSaver
from isotron.core.checkpoint.locate import find
from isotron.core.checkpoint.ranks import SingleRank
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.checkpoint.staging import Buffers
from isotron.core.errors import Refused
from isotron.core.layout import Box, whole
from tests.local.test_checkpoint import ThreadRank, load_all, on_ranks, one, same, save_one, values

WAIT = 30.0


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind: empty, scalar, 16 bits, not contiguous."""
    found = {"w": values((64, 33), seed=seed), "half": values((7, 5), torch.bfloat16, seed), "none": torch.empty(0, 3)}
    return {**found, "one": values((), torch.float64, seed), "turned": values((12, 9), seed=seed).t()}


def parts(tensors: dict[str, torch.Tensor]) -> list[Saved]:
    return [one(name, t) for name, t in tensors.items()]


def test_what_is_saved_is_what_it_was_when_the_save_began(tmp_path: Path):
    saver, live, before = BackgroundSaver(SingleRank()), state(), {n: t.clone() for n, t in state().items()}
    for step in (1, 2):
        saver.start(tmp_path, step, parts(live), {"step": step})
        saver.wait_staged()
        for tensor in live.values():
            tensor.zero_()
        path = saver.wait()
        assert path == find(tmp_path, hashes=True) == tmp_path / f"step_{step:08d}"
        assert same(load_all(path), before if step == 1 else {n: torch.zeros_like(t) for n, t in before.items()})
    assert saver.wait() is None and not saver.ended()


def test_the_same_bytes_as_a_save_that_is_waited_for(tmp_path: Path):
    saver = BackgroundSaver(SingleRank())
    saver.start(tmp_path / "a", 3, parts(state()), {"step": 3}, extra_files={"t/x": b"y"})
    there = save_checkpoint(tmp_path / "b", 3, parts(state()), {"step": 3}, SingleRank(), extra_files={"t/x": b"y"})
    here = saver.wait()
    assert here is not None
    files = [{p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in (here, there)]
    assert files[0] == files[1] and len(files[0]) == 3


def test_buffers_are_kept_and_grow_only():
    buffers, tensors = Buffers(), parts(state())
    first = buffers.lay_out(tensors)
    address, size = first[0].pieces[0][1].data_ptr(), buffers.bytes
    buffers.copy()
    assert buffers.lay_out(tensors)[0].pieces[0][1].data_ptr() == address and buffers.bytes == size
    buffers.lay_out(tensors[:1])
    assert buffers.bytes == size
    buffers.lay_out([*tensors, one("more", values((4096,)))])
    assert buffers.bytes > size


def test_only_the_copy_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    write = save.write_part

    def slow(*args: Any) -> Any:
        assert gate.wait(WAIT)
        return write(*args)

    monkeypatch.setattr(save, "write_part", slow)
    saver = BackgroundSaver(SingleRank())
    saver.start(tmp_path, 1, parts(state()), {})
    saver.wait_staged()
    assert not saver.ended() and find(tmp_path) is None
    with pytest.raises(RuntimeError, match="step 1 is still being saved"):
        saver.start(tmp_path, 2, parts(state()), {})
    gate.set()
    assert saver.wait() == find(tmp_path) and saver.wait() is None


def test_nothing_is_written_over_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, copy = threading.Event(), staging.np.copyto

    def slow(*args: Any) -> None:
        assert gate.wait(WAIT)
        copy(*args)

    monkeypatch.setattr(staging.np, "copyto", slow)
    saver, waited = BackgroundSaver(SingleRank()), threading.Event()
    saver.start(tmp_path, 1, parts(state()), {})
    waiter = threading.Thread(target=lambda: (saver.wait_staged(), waited.set()))
    waiter.start()
    assert not waited.wait(0.2)
    gate.set()
    waiter.join(WAIT)
    assert waited.is_set() and same(load_all(saver.wait() or tmp_path), state())


def test_a_failure_of_one_rank_is_heard_by_all_and_the_pointer_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is full on rank 1 while it writes in the background; the step before is what `latest` names."""
    full = values((4, 4))
    step = save_one(tmp_path, 1, {"w": full})
    write = save.write_staged

    def failing(directory: Path, staged: save.Staged) -> dict[str, Any]:
        if "rank_00001.safetensors" in staged.files:
            raise OSError(28, "No space left on device")
        return write(directory, staged)

    monkeypatch.setattr(save, "write_staged", failing)

    def body(ranks: ThreadRank) -> tuple[bool, Exception]:
        saver, box = BackgroundSaver(ranks), Box((ranks.rank * 2, 0), (2, 4))
        saver.start(tmp_path, 2, [Saved("w", torch.float32, (4, 4), [(box, full[box.slices()])])], {}, keep_last=1)
        saver.wait_staged()
        try:
            saver.wait()
        except Refused as refusal:
            return saver.failed(), refusal
        raise AssertionError("the save went well")

    for asked_about, error in on_ranks(2, body):
        assert not asked_about and isinstance(error, Refused) and error.exit_code == 1
        assert "No space left on device (rank 1 of 2)" in str(error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", step.name]
    assert same(load_all(step), {"w": full})


def test_no_memory_for_the_copies_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(size: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError(f"can't allocate {size} bytes")

    monkeypatch.setattr(staging.devices, "host_buffer", none)

    def body(ranks: ThreadRank) -> Exception | None:
        saver = BackgroundSaver(ranks)
        tensors = [Saved("w", torch.float32, (4,), [(whole((4,)), values((4,)))] if ranks.rank == 0 else [])]
        saver.start(tmp_path, 1, tensors, {})
        saver.wait_staged()
        try:
            saver.wait()
        except Refused as refusal:
            return refusal
        return None

    for error in on_ranks(2, body):
        assert isinstance(error, Refused) and len(error.problems) == 1
        assert "--async-save at step 1" in str(error) and "no memory for the copies" in str(error)
    assert not list(tmp_path.iterdir())
