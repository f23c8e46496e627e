"""A training loop of one's own on `isotron.core` alone: no config files, no data pipeline, no command.

    python examples/core_loop.py                             # one process
    torchrun --nproc-per-node 2 examples/core_loop.py        # the same numbers on two

The layout is one line at the end; the loop does not change with it.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from isotron.core.batch import Batch
from isotron.core.mesh import AXES, Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.clip import clip_factor, global_norm
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig, learning_rate, weight_decay
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout

MODEL = LlamaConfig(num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=97)
SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 32, 2, 8


def microbatches(step: int, dp: int, of: int) -> list[Batch]:
    """This data-parallel rank's part of a step: rows that count up by a stride, a task that is learnt quickly."""
    found = []
    for first in range(step * GLOBAL_BATCH + dp * MICRO_BATCH, (step + 1) * GLOBAL_BATCH, of * MICRO_BATCH):
        ids = torch.arange(first, first + MICRO_BATCH)
        positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1)
        rows = (ids[:, None] * 31 + torch.arange(SEQUENCE + 1) * (1 + ids[:, None] % 5)) % MODEL.vocab_size
        found.append(Batch(rows[:, :-1], rows[:, 1:], torch.ones(MICRO_BATCH, SEQUENCE), positions, ids))
    return found


def train(layout: Layout, steps: int, rank: int = 0) -> list[float]:
    """Losses per token, the same on every rank and in every layout."""
    mesh = Mesh(rank, tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp)
    model = ParallelModel(MODEL, layout, mesh, torch.float32, torch.device("cpu"), seed=1)
    optimizer = make_optimizer(model, OptimConfig())
    schedule = ScheduleConfig(lr=3e-3, lr_warmup_iters=5, lr_decay_iters=max(steps, 6))
    losses = []
    for step in range(steps):
        batches = microbatches(step, mesh.coordinate["dp"], layout.dp)
        tokens = model.count_tokens(batches)
        terms = model.forward_backward(batches, weight=1 / tokens)
        norm = global_norm(optimizer.views, mesh.group(*AXES))
        factor = clip_factor(norm, limit=1.0)
        optimizer.step(learning_rate(schedule, step), weight_decay(schedule, step), factor)
        model.gather_weights()
        losses.append(model.sum_terms(terms, ["loss"])[0] / tokens)
        if rank == 0:
            print(f"step {step + 1:3d}  loss {losses[-1]:.6f}  gradient norm {norm:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    world, steps = int(os.environ.get("WORLD_SIZE", "1")), int(sys.argv[1]) if len(sys.argv) > 1 else 30
    if world > 1:
        dist.init_process_group("gloo")
    train(Layout(tp=world, dp=1), steps, dist.get_rank() if world > 1 else 0)  # or pp=world, or dp=world
    if world > 1:
        dist.destroy_process_group()
