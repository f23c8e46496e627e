"""Runs of an encoder and a decoder: the same numbers in every layout, also of a run that goes on in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isotron.core.mesh import Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.inference.config import EngineConfig
from isotron.inference.pairs import PairEngine
from tests.ranks import runs

pytestmark = pytest.mark.usefixtures("one_thread")
# 3 + 2 blocks: on two stages with one of them in the middle of the encoder, or one that holds blocks of both
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SPxPP2": {"tp": 2, "sequence_parallel": True, "pp": 2},
    "PP2x2chunks zero 2": {"pp": 2, "vpp": 2, "dp": 2, "zero": 2, "micro_batch_size": 1, "recompute": "full"},
}
T5 = {"dtype": "float64", "train_iters": 4, "eval_iters": 2, "eval_interval": 2, "split": "80,20,0", "seq_length": 24,
      "sentinel_ids": (130, 129, 128), "mask_prob": 0.2}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("TP2+SPxPP2", marks=pytest.mark.slow), "PP2x2chunks zero 2"])
def test_goes_on_in_every_layout(ranks: Any, tmp_path: Path, name: str) -> None:
    runs.goes_on(ranks, tmp_path, "t5", T5, {name: LAYOUTS[name]})


WRITES: dict[str, dict[str, Any]] = {"1": {}, "TP2xPP2": {"tp": 2, "pp": 2}, "PP4": {"pp": 4}}


def write(layout: dict[str, Any]) -> list[list[int]]:
    """What this rank's model writes, the likeliest tokens and drawn ones."""
    mesh = Mesh(runs.here().rank, **{"tp": 1, "pp": 1, "dp": 1, **layout})
    where = Layout(dp=1, **layout, make_vocab_size_divisible_by=8)
    model = ParallelModel(runs.MODELS["t5"], where, mesh, torch.float64, torch.device("cpu"), 5)
    engine = PairEngine(model, None, EngineConfig(rows=2))
    prompts = [[5, 7, 9, 1], [1], [8] * 30]
    return [row for t in (0.0, 1.0) for row in engine.generate(prompts, 12, temperature=t, stop_ids=(3, 4)).tokens]


@pytest.mark.parametrize("name", ["TP2xPP2", pytest.param("PP4", marks=pytest.mark.slow)])
def test_writes_the_same_in_every_layout(ranks: Any, name: str) -> None:
    """Stages that hold the encoder alone, blocks of both, and, of four, the decoder alone."""
    (alone,) = ranks(1, write, WRITES["1"])
    assert len({tuple(row) for row in alone}) == 6
    assert ranks(4, write, WRITES[name]) == [alone] * 4
