"""All legal layouts of a model on so many devices: which fit, how long a step takes, what lies on the frontier. PURE.

Two passes. The first takes closed forms of time and memory for every layout; the second runs the real tables of the
best ones and counts their bytes exactly. Legal is what the rules of a run config allow and isotron can run; layouts
that it cannot run (ZeRO-3) are weighed beside them and never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any

from isotron.core.errors import refuse
from isotron.core.parallel.plan import Layout
from isotron.planner.activations import stage_bytes
from isotron.planner.block_time import Place, Seconds
from isotron.planner.job import Job
from isotron.planner.memory import Bytes, communication, logits_bytes, plan_memory, recompute_bytes
from isotron.planner.parameters import stage_layers
from isotron.planner.time import held_elements, step_seconds

MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 6, 8)
FINALISTS = 2
MARGIN = 0.94  # of the device's memory: allocators round and fragment


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs. `memory` is that of the fullest rank; `exact`: from tables, not closed forms."""

    job: Job
    seconds: Seconds
    memory: float
    exact: bool = False

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.seconds.total


@dataclass(frozen=True)
class Found:
    """What a search saw: how many layouts, the best that fit, the frontier, and layouts that cannot be run here."""

    looked_at: int
    fitting: int
    best: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    compared: tuple[Candidate, ...]
    nearest: Candidate | None  # the one that needs least memory, where none fits


def layouts(job: Job, devices: int, node: int) -> Iterator[Job]:
    """Every layout of `job` on `devices` that the model's sizes and the batch allow."""
    c = job.config
    for tp in _divisors(devices, max(8, node) if node < 16 else 8):
        if c.num_attention_heads % tp or c.ffn % tp or (c.kv_heads % tp and tp % c.kv_heads):
            continue
        if job.seq % tp:
            continue
        for pp in _divisors(devices // tp, c.num_layers):
            dp = devices // tp // pp
            for micro in MICRO_BATCHES:
                if job.global_batch % (micro * dp) == 0:
                    yield from _pipelines(replace(job, micro_batch=micro), tp, pp, dp)


def _pipelines(job: Job, tp: int, pp: int, dp: int) -> Iterator[Job]:
    m, layers = job.microbatches, job.config.num_layers
    base = Layout(tp, pp, dp, 1, tp > 1, int(dp > 1), "1f1b")
    kinds = [(1, "1f1b")]
    if pp > 1:
        kinds += [(v, "interleaved") for v in CHUNKS[1:] if layers >= pp * v and m >= pp and layers % (pp * v) == 0]
        kinds += [(1, "zb-h1")]
        kinds += [(2, "zbv")] if layers >= 2 * pp else []
    for v, name in kinds:
        for recompute in ("none", "selective", "full"):
            yield replace(job, layout=replace(base, vpp=v, schedule=name, recompute=recompute))


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def quick_memory(job: Job, context: float) -> float:
    """Bytes of the fullest rank from closed forms: state of the largest share, activations of the first rank."""
    held = held_elements(job)
    own, zero = held / job.layout.shard_ranks, job.layout.zero_stage
    masters = job.wide if job.wide != job.element else 0
    state = (own if zero == 3 else held) * job.element + (own if zero >= 2 else held) * job.wide
    state += own * (masters + 2 * job.wide)
    counts = [len(r) for r in stage_layers(job.config, job.layout)]
    kept = stage_bytes(job, max(counts), True, job.layout.stages == 1) * _in_flight(job)
    rest = recompute_bytes(job) + logits_bytes(job) + communication(job) + _temporary(job)
    return state + kept + rest + context


def _temporary(job: Job) -> float:
    return 2.0 * job.tokens * job.config.hidden_size * job.element * 4 / job.layout.tp


def _in_flight(job: Job) -> float:
    """Chunks of microbatches that the first rank keeps at most."""
    p, m, v, name = job.layout.pp, job.microbatches, job.layout.chunks, job.layout.schedule_name
    if p == 1:
        return v
    most = {"1f1b": p, "zb-h1": p, "zb-h2": 2 * p - 1, "zbv": 2 * p, "gpipe": m}.get(name, m * v)
    if name == "interleaved":
        most = (v - 1) * p + 2 * (p - 1) + 1
    return min(m * v, most)


def search(job: Job, devices: int, place: Place, limit: float, top: int = 10) -> Found:
    """The best layouts of `job`'s model and batch on `devices` of `place` that need at most `limit` bytes."""
    context = place.device.context
    seen = [
        Candidate(j, step_seconds(j, place), quick_memory(j, context)) for j in layouts(job, devices, place.device.node)
    ]
    if not seen:
        raise _nothing(job, devices)
    fitting = sorted((c for c in seen if c.memory <= limit), key=lambda c: c.time)
    best = _refined(fitting, place, limit, top)
    compared = tuple(sharded(job, devices, place, limit))
    nearest = None if best else min(seen, key=lambda c: c.memory)
    return Found(len(seen), len(fitting), best, frontier(seen), compared, nearest)


def _refined(fitting: Sequence[Candidate], place: Place, limit: float, top: int) -> tuple[Candidate, ...]:
    """The fastest ones again from their tables and exact bytes; those that then do not fit fall out."""
    done: list[Candidate] = []
    for c in islice(_varied(fitting), 3 * FINALISTS):
        if len(done) >= FINALISTS:
            break
        exact = evaluate(c.job, place)
        if exact.memory <= limit:
            done.append(exact)
    done.sort(key=lambda c: c.time)
    known = {c.job for c in done}
    worst = done[-1].time if done else 0.0
    rest = [c for c in fitting if c.job not in known and c.time >= worst]
    return tuple([*done, *rest][:top])


def _varied(fitting: Sequence[Candidate]) -> Iterator[Candidate]:
    """Fastest first, at most two of one tp, pp and microbatch: their neighbours tell nothing new."""
    count: dict[tuple[int, int, int], int] = {}
    for c in fitting:
        key = c.job.layout.tp, c.job.layout.pp, c.job.micro_batch
        count[key] = count.get(key, 0) + 1
        if count[key] <= 2:
            yield c


def evaluate(job: Job, place: Place) -> Candidate:
    """One layout from its table, its bytes exact where they can be."""
    memory = max(b.total for b in plan_memory(job, place.device.context))
    return Candidate(job, step_seconds(job, place, exact=True), memory, exact=True)


def frontier(seen: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both time and memory, from least memory to least time."""
    best, out = inf, []
    for c in sorted(seen, key=lambda c: (c.memory, c.time)):
        if c.time < best * 0.999:
            best = c.time
            out.append(c)
    return tuple(out)


def sharded(job: Job, devices: int, place: Place, limit: float) -> Iterator[Candidate]:
    """ZeRO-3 over all devices, with and without tensor parallelism: to weigh, not to choose (not built)."""
    for tp in (1, min(8, place.device.node)):
        dp = devices // tp
        if devices % tp or job.config.num_attention_heads % tp or job.config.ffn % tp or job.seq % tp:
            continue
        found = []
        for micro in MICRO_BATCHES:
            for recompute in ("none", "selective", "full"):
                if job.global_batch % (micro * dp) == 0:
                    layout = replace(Layout(tp, 1, dp, 1, tp > 1), zero=3, recompute=recompute)
                    j = replace(job, micro_batch=micro, layout=layout)
                    found.append(Candidate(j, step_seconds(j, place), quick_memory(j, place.device.context)))
        fit = [c for c in found if c.memory <= limit]
        if fit:
            yield min(fit, key=lambda c: c.time)


def why(found: Found) -> str:
    """One sentence on sharded weights (ZeRO-3) against tensor and pipeline parallelism for this model and batch."""
    if not found.best:
        return "No layout fits, so there is nothing to weigh ZeRO-3 against."
    chosen = found.best[0]
    layout = chosen.job.layout
    name = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"
    if not found.compared:
        return f"{name}: ZeRO-3 cannot spread this batch over all devices or does not fit, so weights are cut instead."
    other = min(found.compared, key=lambda c: c.time)
    rival, ratio = f"ZeRO-3 (tp {other.job.layout.tp})", other.time / chosen.time
    if ratio > 1.02:
        return f"{name} takes {1 / ratio:.0%} of the time of {rival}, which {_excess(other, chosen)}."
    if ratio < 0.98:
        own = _excess(chosen, other)
        return f"{rival} would take {ratio:.0%} of the time of {name}, which {own}; isotron does not have it yet."
    return f"{name} and {rival} take the same time within 2 %; cutting weights keeps communication inside nodes."


_REASONS = {
    "products": "loses {:.0%} of its step to smaller matrix products",
    "recompute": "fits only by computing again, {:.0%} of its step",
    "tp": "spends {:.0%} of its step more on sums between tensor-parallel ranks",
    "zero3": "waits {:.0%} of its step for weights that every microbatch gathers again",
    "bubble": "is idle {:.0%} of its step longer in the pipeline's bubble",
    "dp": "waits {:.0%} of its step longer for gradients to meet",
    "pp": "waits {:.0%} of its step longer between pipeline stages",
}


def _excess(slow: Candidate, fast: Candidate) -> str:
    """What the slower one spends most more time on."""
    more = {k: getattr(slow.seconds, k) - getattr(fast.seconds, k) for k in _REASONS}
    kind = max(more, key=lambda k: more[k])
    return _REASONS[kind].format(max(0.0, more[kind]) / slow.time)


def _nothing(job: Job, devices: int) -> Exception:
    case = f"no layout divides {job.config.num_attention_heads} heads, {job.config.num_layers} layers and the batch"
    asked = f"--gpus {devices} --global-batch-size {job.global_batch}"
    return refuse(asked, case, f"--gpus {devices} --global-batch-size {devices * max(1, job.global_batch // devices)}")


def fullest(memory: Sequence[Bytes]) -> tuple[int, Bytes]:
    """The pipeline rank that holds most, and what it holds."""
    return max(enumerate(memory), key=lambda x: x[1].total)


def describe(layout: Layout) -> dict[str, Any]:
    """The leaves of a layout that a search decides."""
    return {
        "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "vpp": layout.chunks, "zero": layout.zero,
        "schedule": layout.schedule_name, "sequence_parallel": layout.sequence_parallel,
        "recompute": layout.recompute,
    }  # fmt: skip
