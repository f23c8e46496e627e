"""A signal that one rank gets stops all of them."""

from __future__ import annotations

import os
import signal
from typing import Any

from isotron.core.mesh import AXES, Mesh
from isotron.train.faults import StopSignal


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
