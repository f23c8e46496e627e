"""What to compute again so that a rank's activations stay within a number of bytes, at the least work. PURE.

Every way is looked at: nothing; each set of modules of a block; the first n blocks of a stage; units of n blocks. Its
bytes are those of the real pipeline table, with what the unit that is computed again holds meanwhile; its work is that
of the products, of attention and of the memory traffic that are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from isotron.config.schema import RunConfig, changed
from isotron.core.errors import refuse
from isotron.planner.activations import block
from isotron.planner.job import Job
from isotron.planner.memory import activation_peaks, recompute_bytes
from isotron.planner.parameters import rank_stages, stage_layers
from isotron.planner.work import attention_flops, block_products, element_traffic, score_traffic, unread

GIB = float(1 << 30)
MODULES = ("core_attn", "layernorm", "moe_act", "mlp")
FLOPS_PER_BYTE = 100.0  # multiplications that take as long as a byte of memory traffic


@dataclass(frozen=True)
class Choice:
    """Leaves of the layout, the bytes of the fullest rank, and work repeated per block (in multiplications)."""

    leaves: dict[str, Any]
    peak: float
    work: float


def ways(blocks: int) -> Iterator[dict[str, Any]]:
    """Everything that may be asked of stages of at most so many blocks."""
    yield {"recompute": "none"}
    for size in range(1, len(MODULES) + 1):
        for chosen in combinations(MODULES, size):
            yield {"recompute": "selective", "recompute_modules": chosen}
    for n in range(1, blocks):
        yield {"recompute": "full", "recompute_method": "block", "recompute_num_layers": n}
    for n in range(1, blocks + 1):
        yield {"recompute": "full", "recompute_method": "uniform", "recompute_num_layers": n}


def peak_bytes(job: Job) -> float:
    """Most bytes of activations on any rank, with what is computed again at the moment."""
    every = [rank_stages(job.config, job.layout, rank) for rank in range(job.layout.pp)]
    return max(activation_peaks(job, job.table(), every)) + recompute_bytes(job)


def repeated_work(job: Job) -> float:
    """Work of a stage that its backward repeats, for one microbatch, in multiplications."""
    layout, blocks = job.layout, max(len(r) for r in stage_layers(job.config, job.layout))
    if layout.recompute == "full":
        few = min(layout.recompute_num_layers, blocks) if layout.recompute_method == "block" else blocks
        return few * _block_work(job)
    modules = layout.recompute_modules if layout.recompute == "selective" else ()
    return blocks * sum(_module_work(job, name) for name in modules)


def _block_work(job: Job) -> float:
    products = sum(p.multiplications for p in block_products(job.config, job.layout.tp)) * job.tokens
    products -= unread(job) / job.layout.tp * job.tokens
    return products + attention_flops(job, True) / 2 + element_traffic(job) * FLOPS_PER_BYTE


def _module_work(job: Job, name: str) -> float:
    kept = block(job, "none")
    if name == "core_attn":  # only explicit probabilities are formed again
        again = score_traffic(job, job.tokens * job.seq, False) * FLOPS_PER_BYTE + attention_flops(job, False) / 2
        return again if any(t.name == "probabilities" for t in kept) else 0.0
    own = {"layernorm": "norm output", "moe_act": "activation output"}
    written = sum(t.bytes for t in kept if t.name == own.get(name, "")) * job.tokens
    if name == "mlp":
        products = sum(t.elements for t in kept if t.name in ("MLP up", "activation output")) * job.config.hidden_size
        return products * job.tokens + _module_work(job, "moe_act") + _module_work(job, "layernorm") / 2
    return 3 * written * FLOPS_PER_BYTE  # read, read again, written


def choices(job: Job) -> list[Choice]:
    """Every way with its bytes and work, the least work first, then the fewest bytes."""
    found = []
    for leaves in ways(max(len(r) for r in stage_layers(job.config, job.layout))):
        there = job.with_layout(**leaves)
        found.append(Choice(leaves, peak_bytes(there), repeated_work(there)))
    return sorted(found, key=lambda c: (c.work, c.peak))


def choose(job: Job, budget: float) -> Choice:
    """The way of least work within `budget` bytes; refused where none is."""
    every = choices(job)
    fits = [c for c in every if c.peak <= budget]
    if not fits:
        least = min(c.peak for c in every)
        case = f"the least that a rank of this layout can keep is {least / GIB:.4g} GiB, everything computed again"
        fix = f"--activation-budget-gib {round(least / GIB * 1.001 + 5e-5, 4):g}, or a smaller --micro-batch-size"
        raise refuse(f"--activation-budget-gib {budget / GIB:g}", case, fix)
    return fits[0]


def within_budget(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with what is recomputed chosen for its budget of bytes, and a line that says so."""
    gib = config.layout.activation_budget_gib
    if not gib:
        return config, []
    job = Job.of(config)
    chosen = choose(job, gib * GIB)
    everything = peak_bytes(job.with_layout(recompute="none"))
    words = " ".join(
        f"--{k.replace('_', '-')} {' '.join(v) if isinstance(v, tuple) else v}" for k, v in chosen.leaves.items()
    )
    said = f"--activation-budget-gib {gib:g}: {words} keeps {chosen.peak / GIB:.4g} GiB on a rank instead of "
    return changed(config, activation_budget_gib=0.0, **chosen.leaves), [f"{said}{everything / GIB:.4g}"]
