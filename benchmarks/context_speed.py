"""Causal attention, forward and backward, over one long row: a zigzag ring on two processes of one thread each beside
one process of one thread. Prints seconds (best and median) and their ratio, and the ratio of CPU-seconds, of the
busiest rank: what it would be with a free core for each rank and messages that take no time.

    python benchmarks/context_speed.py [--tokens 8192] [--ranks 2] [--comm p2p] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.parallel.context import context_core, local_batch
from isotron.core.parallel.plan import Layout
from isotron.launch import run_ranks

HEADS, KV_HEADS, SIZE = 8, 8, 64


def timed(tokens: int, layout: Layout, repeats: int) -> list[tuple[float, float]]:
    """(seconds, CPU-seconds) of a forward and backward on this rank, first of a barrier to last of a barrier."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, cp=layout.cp)
    plain = Causal(Dropout(0.0, "benchmark"))
    core = plain if layout.cp == 1 else context_core(plain, layout.cp_type(0), layout, mesh)
    row = torch.zeros(1, tokens, dtype=torch.int64)
    whole = Batch(row, row, torch.ones(1, tokens), torch.arange(tokens)[None], torch.zeros(1, dtype=torch.int64))
    ctx = Context(local_batch(whole, mesh.coordinate["cp"], layout.cp))
    own = tokens // layout.cp
    q, k, v = (torch.randn(1, own, h, SIZE).transpose(1, 2).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    up, group, seconds = torch.randn(1, HEADS, own, SIZE), mesh.group("cp"), []
    for _ in range(repeats + 1):
        comm.barrier(group)
        started, worked = time.perf_counter(), time.process_time()
        torch.autograd.grad(core(q, k, v, ctx), (q, k, v), up)
        worked = time.process_time() - worked
        comm.barrier(group)
        seconds.append((time.perf_counter() - started, worked))
    return seconds[1:]


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--comm", default="p2p", choices=("p2p", "allgather", "a2a"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    layout = Layout(dp=1, cp=args.ranks, cp_comm_type=(args.comm,))
    (one,) = run_ranks(1, timed, args.tokens, Layout(dp=1), args.repeats, timeout=300)
    every = run_ranks(args.ranks, timed, args.tokens, layout, args.repeats, timeout=300)
    alone, split = ([wall for wall, _ in found] for found in (one, every[0]))
    for name, found in (("1 process", alone), (f"{args.ranks} processes, {args.comm}", split)):
        print(f"{name}: best {min(found):.3f} s, median {statistics.median(found):.3f} s")
    ratio, middle = min(alone) / min(split), statistics.median(alone) / statistics.median(split)
    work = min(w for _, w in one) / max(min(w for _, w in rank) for rank in every)
    print(f"{args.tokens} tokens: {ratio:.2f} times as fast (best), {middle:.2f} (median), {work:.2f} by CPU-seconds")


if __name__ == "__main__":
    main()
