"""ZeRO-3 for a Hugging Face model in a plain loop; `torchrun --nproc-per-node 2 examples/shard_transformers.py`.

The same numbers as one process: every rank reads its own part of each batch, gradients are means over ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from isotron.core import shard

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=101, max_position_embeddings=32,
)  # fmt: skip


def train(zero: int, steps: int = 4, checkpointing: bool = False, dtype: torch.dtype = torch.float64) -> list[float]:
    """Losses over the global batch and gradient norms of a few steps on random tokens, the same on every rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    sharded = shard(model, optimizer, zero=zero)
    seen = []
    for step in range(steps):
        tokens = torch.randint(0, 101, (4, 16), generator=torch.Generator().manual_seed(step))
        total = torch.zeros((), dtype=torch.float64)
        own = tokens.chunk(world)[rank]
        for part in own.chunk(2 // world if world < 2 else 1):  # accumulate over as many parts as one process needs
            loss = model(input_ids=part, labels=part).loss * len(part) / len(own)
            loss.backward()
            total += loss.detach() / world
        if world > 1:
            dist.all_reduce(total)
        seen += [float(total), sharded.clip_grad_norm_(1.0)]
        optimizer.step()
    return seen


def main() -> None:
    """Under torchrun, or alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        print(" ".join(f"{x:.6f}" for x in train(zero=3)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
