"""What each mode of activation memory keeps and costs, measured: bytes that autograd saves, and seconds of a step.

The layer is GPT-3's, scaled down: heads of 128, a feed-forward four times as wide, dropout, explicit probabilities.

    python benchmarks/activation_memory.py [--hidden 768] [--layers 4] [--tokens 512] [--dropout 0.1] [--repeats 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout

VOCABULARY = 1024
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "probabilities": {"recompute": "selective", "recompute_modules": ("core_attn",)},
    "MLP": {"recompute": "selective", "recompute_modules": ("mlp",)},
    "MLP in 4 chunks": {"mlp_chunks": 4},
    "full, one block": {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "full": {"recompute": "full"},
    "host memory": {"cpu_offloading": True},
}


def model_of(config: GPTConfig, mode: dict[str, Any]) -> ParallelModel:
    """The model on one process."""
    layout = Layout(dp=1, **mode)
    return ParallelModel(config, layout, Mesh(), torch.float32, torch.device("cpu"), 1)


def kept(model: ParallelModel, batch: Batch) -> int:
    """Bytes saved by a forward, each storage once, weights aside."""
    (stage,) = model.stages.values()
    own = {p.untyped_storage().data_ptr() for p in stage.module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x
        return x

    stage.module.train()
    stage.flat.begin()
    with saved_tensors_hooks(pack, lambda x: x):
        out = stage.module(batch, {}, 1.0)
    del out
    return sum(x.untyped_storage().nbytes() for x in found.values())


def steps(model: ParallelModel, batch: Batch, repeats: int) -> Iterator[float]:
    """CPU-seconds of a forward and backward of one thread, which other work on the machine hardly changes."""
    for _ in range(repeats + 1):
        started = time.process_time()
        model.forward_backward([batch], 1e-3)
        yield time.process_time() - started


def main() -> None:
    """One line per mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = GPTConfig(args.layers, args.hidden, max(1, args.hidden // 128), vocab_size=VOCABULARY,
                       max_position_embeddings=args.tokens, hidden_dropout=args.dropout,
                       attention_dropout=args.dropout)  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (1, args.tokens + 1), generator=torch.Generator().manual_seed(1))
    places = torch.arange(args.tokens)[None]
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, args.tokens), places, torch.zeros(1, dtype=torch.int64))
    models = {name: model_of(config, mode) for name, mode in MODES.items()}
    best = {name: float("inf") for name in MODES}
    for _ in range(args.repeats):  # in turns, so that a busy machine slows all of them
        for name, model in models.items():
            best[name] = min(best[name], *steps(model, batch, 1))
    whole = kept(models["none"], batch)
    print(f"{args.layers} layers of {args.hidden}, {args.tokens} tokens, dropout {args.dropout}, float32")
    for name, model in models.items():
        size = 0 if "offload" in str(MODES[name]) else kept(model, batch)
        where = f"{size / 1e6:8.1f} MB, {100 * size / whole:5.1f} %" if size else "  (the same bytes, elsewhere)"
        print(f"{name:26} {where}   {best[name]:.3f} s, {100 * (best[name] / best['none'] - 1):+.0f} %")


if __name__ == "__main__":
    main()
