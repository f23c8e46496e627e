"""The examples of the engine: a plain loop in one and two ranks, Hugging Face's Trainer, Lightning Fabric."""

from __future__ import annotations

import importlib.util
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


def test_in_lightning_fabric() -> None:
    pytest.importorskip("lightning_fabric")
    first, last = example("engine_fabric").train()
    assert last < 0.5 * first
