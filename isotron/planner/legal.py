"""All legal layouts of a model on so many devices. PURE.

Legal is what the rules of a run config allow and isotron can run. Left out is what cannot win: sequences cut into parts
too short to hide their keys' way around (CP), weights or gradients that pipeline stages would gather and scatter for
every microbatch (ZeRO-2 and 3 with PP), experts cut by width beside being dealt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from isotron.core.parallel.plan import Layout
from isotron.planner.experts import expert_sizes
from isotron.planner.job import Job
from isotron.planner.pairs import are_read, rows

MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 6, 8)
CONTEXTS = (2, 4, 8, 16, 32)
SHORTEST = 4096  # tokens of a context-parallel rank


def layouts(job: Job, devices: int, node: int) -> Iterator[Job]:
    """Every layout of `job` on `devices` that the model's sizes and the batch allow."""
    c = job.config
    for tp in _divisors(devices, max(8, node) if node < 16 else 8):
        if c.num_attention_heads % tp or c.ffn % tp or (c.kv_heads % tp and tp % c.kv_heads):
            continue
        if any(n % tp for n in rows(job)):
            continue
        for pp in _divisors(devices // tp, c.num_layers):
            for cp in [1] if are_read(job) else _contexts(job.seq, devices // tp // pp):
                dp = devices // tp // pp // cp
                base = Layout(tp, pp, dp, 1, tp > 1, int(dp * cp > 1), "1f1b", cp=cp)
                for micro in MICRO_BATCHES if cp == 1 else MICRO_BATCHES[:1]:
                    if job.global_batch % (micro * dp) == 0:
                        yield from _sharings(replace(job, micro_batch=micro, layout=base), node)


def _contexts(seq: int, ranks: int) -> list[int]:
    """Into how many parts sequences may be cut."""
    return [1, *(c for c in CONTEXTS if ranks % c == 0 and seq % (2 * c) == 0 and seq // c >= SHORTEST)]


def _sharings(job: Job, node: int) -> Iterator[Job]:
    """What is sharded over data-parallel ranks, and how experts are dealt."""
    layout, ranks = job.layout, job.layout.data_ranks
    for ep in _dealt(job):
        dealt = replace(job.with_layout(ep=ep, etp=1), ep=ep) if ep > 1 else job
        yield from _pipelines(dealt)
        if layout.pp == 1 and ranks > 1:
            yield from _recomputed(dealt.with_layout(zero=2))
            yield from _recomputed(dealt.with_layout(zero=3))
            inside = node // layout.tp
            if 1 < inside < ranks and ranks % inside == 0 and ep == 1:
                yield from _recomputed(dealt.with_layout(zero=3, zero_shard_size=inside))


def _dealt(job: Job) -> list[int]:
    """Ranks over which experts may be dealt: powers of two that divide the experts and the ranks of a stage."""
    experts, ranks = expert_sizes(job.config), job.layout.tp * job.layout.data_ranks
    if experts is None:
        return [1]
    return [e for e in (1, 2, 4, 8, 16, 32, 64) if experts.number % e == 0 and ranks % e == 0]


def _pipelines(job: Job) -> Iterator[Job]:
    m, layers, pp = job.microbatches, job.config.num_layers, job.layout.pp
    kinds = [(1, "1f1b")]
    if pp > 1:
        kinds += [(v, "interleaved") for v in CHUNKS[1:] if layers >= pp * v and m >= pp and layers % (pp * v) == 0]
        kinds += [(1, "zb-h1")]
        kinds += [(2, "zbv"), (2, "v-half")] if layers >= 2 * pp else []
    for v, name in kinds:
        yield from _recomputed(job.with_layout(vpp=v, schedule=name))


def _recomputed(job: Job) -> Iterator[Job]:
    """What is computed again: nothing, what is cheap, half of the blocks, all of them."""
    half = job.config.num_layers // job.layout.stages // 2
    for recompute in ("none", "selective", "full"):
        yield job.with_layout(recompute=recompute)
    if half and job.layout.schedule in ("1f1b", "interleaved"):
        yield job.with_layout(recompute="full", recompute_method="block", recompute_num_layers=half)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]
