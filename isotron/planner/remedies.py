"""What would make a layout fit: single changes on the same devices, or more of them. PURE."""

from __future__ import annotations

from dataclasses import replace

from isotron.planner.block_time import Place
from isotron.planner.job import Job
from isotron.planner.search import Candidate, evaluate


def remedies(job: Job, place: Place, limit: float) -> list[tuple[str, Candidate]]:
    """Single changes of a layout on the same devices that make it fit, fastest first."""
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
    options += _wider(job, place)
    fit = [(text, c) for text, j in options if _legal(j) for c in [evaluate(j, place)] if c.memory <= limit]
    return sorted(fit, key=lambda x: x[1].time)[:3]


def _largest_below(job: Job) -> int:
    return max(m for m in range(1, job.micro_batch) if job.global_batch % (m * job.dp) == 0)


def _wider(job: Job, place: Place) -> list[tuple[str, Job]]:
    """The same devices, cut more: tensor or pipeline ranks doubled and data-parallel ones halved, or more devices."""
    layout, found = job.layout, []
    if job.dp % 2 == 0:
        found.append((f"--tp {2 * layout.tp} --dp {job.dp // 2}", job.with_layout(tp=2 * layout.tp, dp=job.dp // 2)))
        found.append((f"--pp {2 * layout.pp} --dp {job.dp // 2}", job.with_layout(pp=2 * layout.pp, dp=job.dp // 2)))
    more = job.with_layout(dp=2 * job.dp, zero=1)
    found.append((f"--dp {2 * job.dp} (twice the devices)", more))
    found.append((f"--pp {2 * layout.pp} (twice the devices)", job.with_layout(pp=2 * layout.pp)))
    return found


def _legal(job: Job) -> bool:
    c, layout = job.config, job.layout
    fits = c.num_attention_heads % layout.tp == 0 and c.ffn % layout.tp == 0 and job.seq % layout.tp == 0
    groups = c.kv_heads % layout.tp == 0 or layout.tp % c.kv_heads == 0
    batch = job.global_batch % (job.micro_batch * job.dp) == 0
    return fits and groups and batch and c.num_layers >= layout.stages
