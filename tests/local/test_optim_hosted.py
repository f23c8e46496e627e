"""Optimizer state in host memory and in files: same numbers, and what cannot be offloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.errors import Refused
from isotron.core.mapped import Disk
from isotron.core.optim import hosted
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.optimizer import Optimizer
from isotron.core.parallel.offload import Offload
from isotron.core.parallel.units import Units
from tests.local.test_optim import numbers, view

SHAPES = ((40, 130), (7,), (33, 5), (300,))


def stepped(cfg: OptimConfig, dtype: torch.dtype, offload: Offload) -> list[Tensor]:
    """Weights and stored state after three steps."""
    wide = torch.promote_types(dtype, torch.float32)
    weights = [numbers(*shape).to(dtype) for shape in SHAPES]
    grads = [torch.empty(shape, dtype=wide) for shape in SHAPES]
    optimizer = Optimizer([view(w, g) for w, g in zip(weights, grads, strict=True)], cfg, offload=offload)
    for i in range(3):
        for j, grad in enumerate(grads):
            grad.copy_(numbers(*grad.shape, seed=10 * i + j))
        optimizer.step(1e-2, 0.1, 0.5)
    return [*weights, *(slot.kept.stored() for slot in optimizer.slots())]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_no_bit_changes(
    name: str, dtype: torch.dtype, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = OptimConfig(optimizer=name, exp_avg_dtype=kept, exp_avg_sq_dtype=kept)
    here = stepped(cfg, dtype, Offload())
    monkeypatch.setattr(hosted, "GROUP", 300)
    for offload in (Offload(0.3), Offload(1.0), Offload(1.0, str(tmp_path))):
        there = stepped(cfg, dtype, offload)
        assert len(there) == len(here) and all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prefetch", [True, False])
def test_weights_in_files_are_read_ahead_of_their_gathering(prefetch: bool) -> None:
    said: list[str] = []

    def bucket(name: str) -> Any:
        say = {what: lambda what=what: said.append(f"{what} {name}") for what in ("acquire", "read_ahead")}
        return SimpleNamespace(**say, wait_weights=lambda: None, release=lambda: None)

    units = Units({name: [bucket(name)] for name in ("layers.0", "layers.1", "layers.2")}, prefetch)
    units.enter("layers.0", torch.zeros(1))
    ahead = ["acquire layers.1", "read_ahead layers.2"] if prefetch else ["read_ahead layers.1"]
    assert said == ["acquire layers.0", *ahead]
    units.settle()
    said.clear()
    units.begin_backward(units.units["layers.2"])
    ahead = ["acquire layers.1", "read_ahead layers.0"] if prefetch else ["read_ahead layers.1"]
    assert said == ["acquire layers.2", *ahead]


def test_a_file_keeps_what_has_left_memory(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), 1 << 20)
    one, two = disk.zeros((1000,), torch.float32), disk.zeros((3, 7), torch.int8)
    one += 3
    two += 4
    disk.leave()
    disk.fetch()
    assert (one == 3).all() and (two == 4).all()
    disk.leave(one)
    disk.fetch(one)
    disk.fetch(two)
    assert (one == 3).all() and (two == 4).all()


def test_a_directory_that_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="--offload-dir nowhere"):
        Disk("nowhere", 4096)


def test_what_cannot_be_offloaded_is_refused() -> None:
    one = replace(view(numbers(8, 4).bfloat16(), torch.zeros(8, 4)))
    with pytest.raises(Refused, match="one of the two"):
        Optimizer([one], OptimConfig(master_remainders=True), offload=Offload(1.0))


def test_a_file_for_which_there_is_no_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not by the signal that ends a process when a page of a full disk is written."""

    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(Refused, match=r"no file of 4096 bytes can be mapped there(.|\n)*with room"):
        Disk(str(tmp_path), 4096)
