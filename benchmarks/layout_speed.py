"""Two processes of one thread each beside one process of two threads: same model, same global batch, one interleaved
run.

    python benchmarks/layout_speed.py [--dtype float32|bfloat16] [--rounds 3] [--steps 2] [--only pp2] [--json]

The model is that of `train_speed.py`, the heap that of `isotron train`. Quoted are ratios of medians of step times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from isotron import birth
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.pool import run_ranks
from isotron.train.step import train_step

CONFIG = LlamaConfig(8, 512, 8, 4, ffn_hidden_size=1408, vocab_size=32000, max_position_embeddings=512)
ROWS, SEQUENCE = 4, 512

# name -> (layout, sequences per microbatch, threads per process)
CONTENDERS = {
    "1 process, 2 threads": (Layout(dp=1), 4, 2),
    "dp2": (Layout(dp=2), 2, 1),
    "tp2+sp": (Layout(tp=2, dp=1, sequence_parallel=True), 4, 1),
    "pp2, 4 microbatches": (Layout(pp=2, dp=1, layer_split="balanced"), 1, 1),
    "pp2 zb-h1, 4 microbatches": (Layout(pp=2, dp=1, layer_split="balanced", schedule="zb-h1"), 1, 1),
    "pp2 even, 4 microbatches": (Layout(pp=2, dp=1), 1, 1),
}


def batches(step: int, micro: int, dp: int, dp_index: int) -> list[Batch]:
    """This rank's microbatches of a global batch of ROWS sequences."""
    generator = torch.Generator().manual_seed(step)
    t = torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(micro, -1)
    starts = range(dp_index * micro, ROWS, micro * dp)
    rows = [(t[i : i + micro], torch.arange(i, i + micro)) for i in starts]
    return [Batch(r[:, :-1], r[:, 1:], torch.ones(micro, SEQUENCE), positions, ids) for r, ids in rows]


def body(layout: Layout, micro: int, threads: int, dtype: str, steps: int) -> list[float]:
    """Step times of one rank after one step of warming up, seconds."""
    import torch.distributed as dist

    torch.set_num_threads(threads)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, tp=layout.tp, dp=layout.dp, pp=layout.pp)
    model = ParallelModel(CONFIG, layout, mesh, getattr(torch, dtype), torch.device("cpu"), 1)
    optimizer = make_optimizer(model, OptimConfig())
    schedule = ScheduleConfig(lr=1e-4, lr_decay_style="constant")
    times = []
    for i in range(steps + 1):
        started = time.perf_counter()
        mine = batches(i, micro, layout.dp, mesh.coordinate["dp"])
        train_step(model, optimizer, schedule, mine)
        times.append(time.perf_counter() - started)
    model.wait_weights()
    return times[1:]


def main() -> None:
    """Interleave, print medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="layouts whose names begin so, beside one process")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    birth.start_again()
    chosen = {name: c for name, c in CONTENDERS.items() if name.startswith(("1 process", args.only))}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(args.rounds):
        for name, (layout, micro, threads) in chosen.items():
            per_rank = run_ranks(layout.world, body, layout, micro, threads, args.dtype, args.steps, timeout=300.0)
            times[name] += [max(step) for step in zip(*per_rank, strict=True)]
    medians = {name: statistics.median(t) for name, t in times.items()}
    base = medians["1 process, 2 threads"]
    result = {name: {"tokens_per_s": ROWS * SEQUENCE / t, "of_one_process": base / t} for name, t in medians.items()}
    print(json.dumps({"dtype": args.dtype, **result}, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
