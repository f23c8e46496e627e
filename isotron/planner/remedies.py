"""What would make a layout fit: changes on the same devices, or more of them. PURE."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from isotron.planner.block_time import Place
from isotron.planner.job import Job
from isotron.planner.pairs import rows
from isotron.planner.search import Candidate, evaluate


def remedies(job: Job, place: Place, limit: float) -> list[tuple[str, Candidate]]:
    """Changes of a layout that make it fit, fastest first."""
    fit = [(text, c) for text, j in changes(job) for c in [evaluate(j, place)] if c.memory <= limit]
    return sorted(fit, key=lambda x: x[1].time)[:3]


def changes(job: Job, more: bool = True) -> list[tuple[str, Job]]:
    """Legal changes that need less, by what they do to a run: computing again, smaller microbatches, sharding, cutting;
    those that need more devices last, where `more` are to be had.
    """
    found = [*_same_devices(job), *_wider(job)]
    return [(text, j) for text, j in found if legal(j) and (more or j.world <= job.world)]


def _same_devices(job: Job) -> list[tuple[str, Job]]:
    layout, options = job.layout, []
    if layout.recompute == "none":
        options.append(("--recompute selective", job.with_layout(recompute="selective")))
    if layout.recompute != "full":
        options.append(("--recompute full", job.with_layout(recompute="full")))
    if layout.tp > 1 and not layout.sequence_parallel:
        options.append(("--sequence-parallel", job.with_layout(sequence_parallel=True)))
    if layout.tp > 1 and layout.recompute != "full":
        both = job.with_layout(sequence_parallel=True, recompute="full")
        options.append(("--sequence-parallel --recompute full", both))
    if layout.chunks > 1:
        options.append(("--vpp 1 --schedule 1f1b", job.with_layout(vpp=1, schedule="1f1b")))
    if job.micro_batch > 1:
        smaller, one = replace(job, micro_batch=_largest_below(job)), replace(job, micro_batch=1)
        options.append((f"--micro-batch-size {smaller.micro_batch}", smaller))
        lean = one.with_layout(sequence_parallel=layout.tp > 1, recompute="selective")
        sequence = "--sequence-parallel " if layout.tp > 1 and not layout.sequence_parallel else ""
        options.append((f"--micro-batch-size 1 {sequence}--recompute selective", lean))
    options += [
        (f"--zero {z}", job.with_layout(zero=z)) for z in (1, 2, 3) if job.data_ranks > 1 and z > layout.zero_stage
    ]
    least = replace(job, micro_batch=1).with_layout(sequence_parallel=layout.tp > 1, recompute="full")
    if job.data_ranks > 1 and layout.zero_stage < 3:
        options.append(("--micro-batch-size 1 --recompute full --zero 3", least.with_layout(zero=3)))
    return options


def _largest_below(job: Job) -> int:
    own = job.global_batch // job.dp
    low = [m for m in range(1, min(isqrt(own) + 1, job.micro_batch)) if own % m == 0]
    return max([1, *low, *(own // m for m in low if own // m < job.micro_batch)])


def _wider(job: Job) -> list[tuple[str, Job]]:
    """The same devices, cut more: tensor or pipeline ranks doubled and data-parallel ones halved, or more devices."""
    layout, found = job.layout, []
    if job.dp % 2 == 0:
        found.append((f"--tp {2 * layout.tp} --dp {job.dp // 2}", job.with_layout(tp=2 * layout.tp, dp=job.dp // 2)))
        found.append((f"--pp {2 * layout.pp} --dp {job.dp // 2}", job.with_layout(pp=2 * layout.pp, dp=job.dp // 2)))
    more = job.with_layout(dp=2 * job.dp, zero=1)
    found.append((f"--dp {2 * job.dp} (twice the devices)", more))
    found.append((f"--pp {2 * layout.pp} (twice the devices)", job.with_layout(pp=2 * layout.pp)))
    return found


def legal(job: Job) -> bool:
    """Whether sizes divide."""
    c, layout = job.config, job.layout
    fits = (
        c.num_attention_heads % layout.tp == 0 and c.ffn % layout.tp == 0 and all(n % layout.tp == 0 for n in rows(job))
    )
    groups = c.kv_heads % layout.tp == 0 or layout.tp % c.kv_heads == 0
    batch = job.global_batch % (job.micro_batch * job.dp) == 0
    return fits and groups and batch and c.num_layers >= layout.stages
