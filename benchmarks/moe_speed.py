"""A block of experts forward and backward, beside the same block of `transformers`, in one run on one thread.

    python benchmarks/moe_speed.py [--rounds 7] [--theirs eager]

8 experts, 2 per token, hidden 512, FFN 1408, 2048 tokens; gradients of the input and of every weight. The two are timed
in turn, and the best of the rounds counts, so that another load on the machine hurts both alike. With them, the six
products of the block alone: no order of the rest is faster than that.
`--theirs` names an implementation of theirs: grouped_mm is what version 5 picks, eager what was picked before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig as TheirConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from isotron.core.batch import Batch
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.nn.context import Context
from isotron.core.nn.linear import GradSink
from isotron.core.nn.moe import MoE

HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 512, 1408, 8, 2, 2048


def theirs(dtype: torch.dtype, way: str | None = None) -> Any:
    """Their block, out of a model, with an implementation by name, or the one that their library picks."""
    config = TheirConfig(
        vocab_size=8, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=EXPERTS, num_experts_per_tok=TOPK, experts_implementation=way,
    )  # fmt: skip
    return MixtralForCausalLM(config).model.layers[0].mlp.to(dtype).train()


def ours(block: Any, dtype: torch.dtype) -> MoE:
    """Our block with the same weights, its gradients in float32 buffers as in training."""
    cfg = MixtralConfig(1, HIDDEN, 8, 8, ffn_hidden_size=FFN, num_experts=EXPERTS, moe_router_topk=TOPK)
    made = MoE(cfg, HIDDEN, "layers.0").to(dtype)
    made.router.weight.data.copy_(block.gate.weight.data)
    made.experts.gate_up.weight.data.copy_(block.experts.gate_up_proj.data.flatten(0, 1))
    made.experts.down.weight.data.copy_(block.experts.down_proj.data.flatten(0, 1))
    for p in made.parameters():
        p.grad_sink = GradSink(torch.zeros(p.shape))  # type: ignore[attr-defined]
    return made


def products(dtype: torch.dtype) -> Callable[[], None]:
    """The products of the block, a call for each expert, into tensors that are there; each has as many rows."""
    rows = TOKENS * TOPK // EXPERTS
    x, h, a, y = (torch.randn(EXPERTS, rows, width, dtype=dtype) for width in (HIDDEN, 2 * FFN, FFN, HIDDEN))
    up, down = torch.randn(EXPERTS, 2 * FFN, HIDDEN, dtype=dtype), torch.randn(EXPERTS, HIDDEN, FFN, dtype=dtype)
    pairs = (x, up.mT), (a, down.mT), (y, down), (y.mT, a), (h, up), (h.mT, x)
    made = [torch.empty(EXPERTS, left.shape[1], right.shape[2], dtype=dtype) for left, right in pairs]

    def run() -> None:
        for (left, right), out in zip(pairs, made, strict=True):
            for e in range(EXPERTS):
                torch.mm(left[e], right[e], out=out[e])

    return run


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(dtype: torch.dtype, rounds: int, way: str | None) -> None:
    """One line for one type."""
    other = theirs(dtype, way)
    block = ours(other, dtype)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=dtype)
    zeros = torch.zeros(1, TOKENS, dtype=torch.long)
    ctx = Context(Batch(zeros, zeros, zeros.float(), zeros, zeros[:, 0]))
    up = torch.randn(1, TOKENS, HIDDEN, dtype=dtype)
    found: list[Tensor] = []

    def run_ours() -> None:
        for p in block.parameters():
            p.grad_sink.fresh = True  # type: ignore[attr-defined]
        leaf = x.clone().requires_grad_()
        y = block(leaf, ctx)
        y.backward(up)
        found[:1] = [y.detach()]

    def run_theirs() -> None:
        for p in other.parameters():
            p.grad = None
        leaf = x.clone().requires_grad_()
        y = other(leaf)
        y.backward(up)
        found[1:] = [y.detach()]

    run_ours(), run_theirs()
    difference = float((found[0] - found[1]).abs().max() / found[1].abs().max())
    contenders = run_ours, run_theirs, products(dtype)
    mine, their, alone = (
        min(times) for times in zip(*(tuple(map(timed, contenders)) for _ in range(rounds)), strict=True)
    )
    flops = 3 * 2 * TOKENS * TOPK * 3 * HIDDEN * FFN
    print(
        f"{str(dtype)[6:]:9} isotron {mine * 1e3:7.1f} ms ({flops / mine / 1e9:5.1f} GFLOP/s)   transformers "
        f"{their * 1e3:7.1f} ms   {their / mine:4.2f}x   products alone {alone * 1e3:7.1f} ms   largest difference "
        f"{difference:.1e}"
    )


def main() -> None:
    """Both types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--theirs", help="their implementation; by default the one that they pick")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        compare(dtype, args.rounds, args.theirs)


if __name__ == "__main__":
    main()
