"""A signal that one rank gets stops all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from isotron.config.schema import RunConfig
from isotron.core.mesh import AXES, Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.exits import EXIT_SIGNALLED
from isotron.train.faults import StopSignal
from tests.ranks import runs


def stop_after_signal_on(rank_told: int) -> tuple[list[bool], str]:
    """The answers of three steps, before the second of which one rank gets SIGUSR1."""
    import torch.distributed as dist

    rank = dist.get_rank()
    world = Mesh(rank, dp=dist.get_world_size()).group(*AXES)
    answers = []
    with StopSignal() as stop:
        for step in range(3):
            if step == 1 and rank == rank_told:
                os.kill(os.getpid(), signal.SIGUSR1)
            answers.append(stop.agreed(world))
        return answers, stop.name


def test_all_ranks_stop_after_the_same_step(ranks: Any) -> None:
    for told in (0, 1):
        assert ranks(2, stop_after_signal_on, told) == [([False, True, True], "SIGUSR1")] * 2


def train_told_while_evaluating(cfg: RunConfig, run_dir: str) -> tuple[int, int]:
    """Rank 1 gets SIGTERM in the second batch of an evaluation; the exit code, and the batches evaluated."""
    rank, evaluate, batches = runs.here().rank, ParallelModel.evaluate, []

    def told(model: ParallelModel, *args: Any) -> Any:
        batches.append(1)
        if rank == 1 and len(batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(model, *args)

    with patch.object(ParallelModel, "evaluate", told):
        return runs.train(cfg, run_dir), len(batches)


@pytest.mark.parametrize(("interval", "step"), [(2, 2), (0, 3)], ids=["in the middle", "the last one"])
def test_an_evaluation_does_not_keep_a_stop_waiting(ranks: Any, tmp_path: Path, interval: int, step: int) -> None:
    cfg = runs.config("llama", tp=2, train_iters=3, eval_iters=50, eval_interval=interval)
    assert ranks(2, train_told_while_evaluating, cfg, str(tmp_path)) == [(EXIT_SIGNALLED, 2)] * 2
    assert Path(runs.step_dir(tmp_path, step)).is_dir()
