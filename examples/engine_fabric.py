"""The core inside Lightning Fabric: Fabric sets up processes, devices and data, the engine trains.

Needs lightning-fabric. python examples/engine_fabric.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn as nn
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import isotron

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
}


def train(processes: int = 1) -> tuple[float, float]:
    """(first, last) loss of the mean over processes."""
    strategy = "auto" if processes == 1 else "ddp"
    fabric = Fabric(accelerator="cpu", devices=processes, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, *_ = isotron.initialize(model=net, config=CONFIG)
    rows = torch.randn(320, 8, generator=torch.Generator().manual_seed(2))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))
    losses = []
    for (x,) in loader:
        loss = nn.functional.mse_loss(engine(x), x.sum(-1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(float(fabric.all_reduce(loss.detach())))  # type: ignore[arg-type]
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss {:.4f} -> {:.4f}".format(*train(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
