"""The examples of the engine: a plain loop in one and two ranks, Hugging Face's Trainer, Lightning Fabric."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Ranks = Callable[..., list[Any]]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loop() -> list[float]:
    return example("engine_loop").train()


def test_a_plain_loop_is_the_same_on_two_ranks(ranks: Ranks) -> None:
    alone, shared = ranks(1, loop)[0], ranks(2, loop)
    assert alone[-1] < 0.2 * alone[0]
    assert all(losses == pytest.approx(alone, rel=1e-4) for losses in shared)


def test_in_the_trainer_of_hugging_face() -> None:
    pytest.importorskip("accelerate")
    first, last = example("engine_trainer").train()
    assert last < 0.8 * first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ("-m torch.distributed.run --standalone --nproc-per-node 2 {}/engine_trainer.py", 0.9),
        ("{}/engine_fabric.py 2", 0.5),
    ],
)
def test_in_both_on_two_processes(words: str, bound: float) -> None:
    """Every rank prints the losses that it saw first and last."""
    command = [sys.executable, *words.format(EXAMPLES).split()]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert len(losses) == 2 and all(float(last) < bound * float(first) for first, last in losses), done.stdout


def test_in_lightning_fabric() -> None:
    pytest.importorskip("lightning_fabric")
    first, last = example("engine_fabric").train()
    assert last < 0.5 * first
