"""What it costs to send tokens to experts of other ranks: a block of experts on two processes, forward and backward.

    python benchmarks/expert_parallel.py [--rounds 5] [--tokens 2048]

8 experts, 2 per token, hidden 512, FFN 1408. `held`: every rank holds all experts and sends nothing.
`alltoall`, `allgather`: each rank holds half of them; `halves`: half of the tokens are sent (alltoall) while the other
half is computed. Seconds are the best round of the slower rank; `waited` is what
of it was spent waiting for the other rank, and the bytes are what one rank sends.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.nn.context import Context
from isotron.core.nn.experts import Experts
from isotron.core.nn.linear import GradSink
from isotron.core.nn.moe import MoE
from isotron.core.parallel.expert import fill_experts
from isotron.core.parallel.plan import Layout
from isotron.launch import run_ranks

HIDDEN, FFN, EXPERTS, TOPK = 512, 1408, 8, 2


def rounds(kind: str, tokens: int, count: int) -> tuple[float, float]:
    """(seconds, seconds waited) of the best round on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ep = 1 if kind == "held" else 2
    layout = Layout(dp=2, ep=ep, moe_token_dispatcher_type="allgather" if kind == "allgather" else "alltoall")
    layout = replace(layout, overlap_moe_expert_parallel_comm=kind == "halves")
    cfg = MixtralConfig(1, HIDDEN, 8, 8, ffn_hidden_size=FFN, num_experts=EXPERTS, moe_router_topk=TOPK)
    block = MoE(cfg, HIDDEN, "layers.0")
    block.experts = Experts(EXPERTS // ep, HIDDEN, FFN)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.02)
        p.grad_sink = GradSink(torch.zeros(p.shape))  # type: ignore[attr-defined]
    fill_experts(block, layout, Mesh(dist.get_rank(), **layout.axes))
    zeros = torch.zeros(1, tokens, dtype=torch.long)
    ctx = Context(Batch(zeros, zeros, zeros.float(), zeros, zeros[:, 0]))
    x, up = torch.randn(2, 1, tokens, HIDDEN)
    found = []
    for _ in range(count + 1):
        leaf, waited = x.clone().requires_grad_(), comm.WAITED.seconds
        dist.barrier()
        start = time.perf_counter()
        block(leaf, ctx).backward(up)
        found.append((time.perf_counter() - start, comm.WAITED.seconds - waited))
    return min(found[1:])


def main() -> None:
    """One line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    rows = given.tokens * HIDDEN * 4
    sent = {"held": 0, "alltoall": 4 * rows * TOPK // 2, "halves": 4 * rows * TOPK // 2, "allgather": 4 * rows}
    for kind in sent:
        seconds, waited = max(run_ranks(2, rounds, kind, given.tokens, given.rounds, timeout=240))
        print(f"{kind:10} {seconds * 1e3:7.1f} ms   waited {waited * 1e3:6.1f} ms   {sent[kind] / 1e6:6.1f} MB sent")


if __name__ == "__main__":
    main()
