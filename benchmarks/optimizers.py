"""Seconds of an update of 50 million parameters, ours beside torch's optimizers, in turns, on the same tensors.

    python benchmarks/optimizers.py [--threads 1] [--rounds 15] [--elements 50000000] [--rules adamw sgd lion] [--json]

`many`: 290 tensors, the matrices, biases and gains of 24 blocks. `flat`: one tensor. torch has no Lion: ours stands
beside its SGD with momentum, which reads and writes as much. Each round runs every contender once, in every order in
turn; the ratio is that of medians. All contenders step the very same weights, gradients and moments: on a virtual
machine the same loop over another tensor of the same size can take twice the time, by where its pages lie. Numbers are
compared on small tensors of their own, where both know the rule.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor

from isotron.core.layout import Placed, Rule, shard, whole
from isotron.core.mesh import Mesh
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.optimizer import Optimizer
from isotron.core.parallel.data import View

LR, DECAY = 1e-3, 0.1


def shapes(kind: str, elements: int) -> list[tuple[int, ...]]:
    """Of the tensors: one, or those of 24 blocks of a width that makes up about so many elements."""
    if kind == "flat":
        return [(elements,)]
    width = max(8, int((elements / 24 / 12) ** 0.5) // 8 * 8)
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    block += [(width, 4 * width), (width,), *([(width,)] * 4)]
    return [shape for _ in range(24) for shape in block]


def ours(rule: str, weights: list[Tensor], grads: list[Tensor]) -> Optimizer:
    """`isotron.core.optim` over the given tensors."""
    mesh, views = Mesh(), []
    for number, (w, g) in enumerate(zip(weights, grads, strict=True)):
        name = Rule(f"w{number}", tuple(w.shape))
        placed = Placed(name.pattern, name, shard(name, mesh.coordinate, mesh.sizes))
        views.append(View(placed, whole(tuple(w.shape)), w.view(-1), g.view(-1)))
    return Optimizer(views, OptimConfig(optimizer=rule, adam_beta2=0.95))


def theirs(rule: str, how: str, weights: list[Tensor], grads: list[Tensor]) -> torch.optim.Optimizer:
    """torch's over the given tensors."""
    for w, g in zip(weights, grads, strict=True):
        w.grad = g
    kind = {"fused": how == "fused", "foreach": how == "foreach"}
    if rule == "adamw":
        return torch.optim.AdamW(weights, LR, (0.9, 0.95), 1e-8, DECAY, **kind)
    return torch.optim.SGD(weights, LR, 0.9, weight_decay=DECAY, **kind)


def share_state(rule: str, optimizer: torch.optim.Optimizer, mine: Optimizer, weights: list[Tensor]) -> None:
    """torch's optimizer goes on with the moments of ours."""
    for w, kept in zip(weights, mine.states, strict=True):
        moments = {name: kept[name].stored().view(w.shape) for name in kept if name != "master"}
        names = {"momentum": "momentum_buffer"}
        optimizer.state[w] = {names.get(name, name): moment for name, moment in moments.items()}
        if rule == "adamw":
            optimizer.state[w]["step"] = torch.tensor(float(mine.updates))


def drawn(kind: str, elements: int) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and gradients."""
    draw = torch.Generator().manual_seed(1)
    sizes = shapes(kind, elements)
    return [torch.randn(s, generator=draw) for s in sizes], [torch.randn(s, generator=draw) for s in sizes]


def checked(rule: str, kind: str) -> None:
    """Three steps of each contender on tensors of its own end in the same weights."""
    found = []
    for name in ("ours", "fused", "foreach"):
        weights, grads = drawn(kind, 100_000)
        step = own_step(ours(rule, weights, grads)) if name == "ours" else theirs(rule, name, weights, grads).step
        for _ in range(3):
            step()
        found.append(weights)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-6)


def own_step(optimizer: Optimizer) -> Callable[[], None]:
    """A step of ours as a call without arguments."""
    return lambda: optimizer.step(LR, DECAY, 1.0)


def compared(rule: str, kind: str, elements: int, rounds: int) -> dict[str, float]:
    """Median seconds by contender."""
    if rule != "lion":
        checked(rule, kind)
    weights, grads = drawn(kind, elements)
    mine = ours(rule, weights, grads)
    steps: dict[str, Callable[[], object]] = {"ours": own_step(mine)}
    for how in ("fused", "foreach"):
        other = theirs(rule, how, weights, grads)
        share_state(rule, other, mine, weights)
        steps[how] = other.step
    times: dict[str, list[float]] = {name: [] for name in steps}
    orders = list(permutations(steps))  # what ran before matters: everyone follows everyone
    for number in range(rounds + 2):
        for name in orders[number % len(orders)]:
            began = time.perf_counter()
            steps[name]()
            if number >= 2:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Prints a line per rule and kind of tensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--rules", nargs="+", default=["adamw", "sgd", "lion"])
    parser.add_argument("--kinds", nargs="+", default=["many", "flat"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for rule in args.rules:
        for kind in args.kinds:
            found = compared(rule, kind, args.elements, args.rounds)
            facts = {"rule": rule, "tensors": kind, "threads": args.threads, **found}
            if args.json:
                print(json.dumps(facts), flush=True)
                continue
            ms = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in found.items())
            beside = ", ".join(f"{found['ours'] / found[n]:.2f} of {n}" for n in ("fused", "foreach"))
            print(f"{rule:<6} {kind:<5} {args.threads} threads: {ms}; ours {beside}", flush=True)


if __name__ == "__main__":
    main()
