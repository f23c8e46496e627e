"""Any module in an engine: a plain loop, with DeepSpeed's config. One process, or several under torchrun.

python examples/engine_loop.py
torchrun --nproc-per-node 2 examples/engine_loop.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn as nn

import isotron

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 5}},
}


def train(steps: int = 40) -> list[float]:
    """The loss of every step: a net that learns to add up its inputs."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, _, _, _ = isotron.initialize(model=net, config=CONFIG)
    rank, ways = engine.group.index, engine.group.size
    losses: list[float] = []
    for step in range(steps):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        total = torch.zeros(())
        for part in range(engine.gradient_accumulation_steps()):
            size = engine.train_micro_batch_size_per_gpu()
            first = (part * ways + rank) * size
            x = rows[first : first + size]
            loss = nn.functional.mse_loss(engine(x), x.sum(-1, keepdim=True))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        if ways > 1:
            dist.all_reduce(total)
        losses.append(float(total) / ways)
    return losses


if __name__ == "__main__":
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    found = train()
    if not several or dist.get_rank() == 0:
        print(f"loss {found[0]:.4f} -> {found[-1]:.4f}")
    if several:
        dist.destroy_process_group()
