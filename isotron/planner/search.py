"""All legal layouts of a model on so many devices: which fit, how long a step takes, what lies on the frontier. PURE.

Two passes. The first takes closed forms of time and memory for every layout; the second runs the real tables of the
best ones, and counts the bytes of every one in the list. Which layouts there are, `legal.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from isotron.core.errors import refuse
from isotron.core.parallel.plan import Layout
from isotron.planner import pairs
from isotron.planner.activations import stage_bytes
from isotron.planner.block_time import Place, Seconds
from isotron.planner.job import Job
from isotron.planner.legal import layouts
from isotron.planner.memory import Bytes, communication, deferred_logits, logits_bytes, plan_memory, recompute_bytes
from isotron.planner.parameters import stage_layers
from isotron.planner.states import per_element
from isotron.planner.time import block_elements, copies, held_elements, held_experts, step_seconds
from isotron.planner.work import block_products

FINALISTS = 2
COUNTED = 40  # layouts whose bytes are counted for the list, at most
LOOKS, LONGEST_LOOK = 6, 40  # layouts that are counted exactly: with one that fits at hand, and until there is one
Progress = Callable[[int], Callable[[], None]]
MARGIN = 0.94  # of the device's memory: allocators round and fragment


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs. `memory` is that of the fullest rank; `exact`: seconds and bytes from tables, not
    closed forms; `counted`: the bytes.
    """

    job: Job
    seconds: Seconds
    memory: float
    exact: bool = False
    counted: bool = False

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.seconds.total


@dataclass(frozen=True)
class Found:
    """What a search saw: how many layouts, the best that fit, the frontier, and the fastest of the other way: with
    sharded weights (ZeRO-3) where the best has cut ones, and the other way round.
    """

    looked_at: int
    fitting: int
    best: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    compared: tuple[Candidate, ...]
    nearest: Candidate | None  # the one that needs least memory, where none fits


def quick_memory(job: Job, context: float) -> float:
    """Bytes of the fullest rank from closed forms: state of the largest share, activations of the first rank."""
    held, experts, zero = held_elements(job), held_experts(job), job.layout.zero_stage
    own = (held - experts) / job.layout.shard_ranks + experts / job.layout.expert_shard_ranks
    state = (own if zero == 3 else held) * job.element + (own if zero >= 2 else held) * job.gradient
    state += own * per_element(job)
    kept = _kept(job) * _in_flight(job)
    rest = recompute_bytes(job) + logits_bytes(job) + communication(job) + _temporary(job) + _passing(job)
    return state + kept + rest + context


def _kept(job: Job) -> float:
    """Activations of a microbatch in a stage: of the first with the most blocks, or of the fullest of a pair's; of the
    last where it keeps what waits for the output layer's weight gradient.
    """
    split = stage_layers(job.config, job.layout)
    last = len(split) - 1
    if pairs.are_read(job):
        return max(pairs.stage_bytes(job, r, s == 0, s == last) for s, r in enumerate(split))
    first = stage_bytes(job, max(map(len, split)), True, last == 0)
    if job.layout.schedule_name not in ("zb-h1", "zb-h2") or not last:
        return first
    return max(first, stage_bytes(job, len(split[last]), False, True) + deferred_logits(job))


def _passing(job: Job) -> float:
    """What exists for a moment: three largest sums of gradients under way and one that is formed, and under ZeRO-3 the
    weights of a block and of the next unit.
    """
    zero = job.layout.zero_stage
    products = block_products(job.config, job.layout.tp, job.layout.expert_tp)
    ends = job.layout.padded_vocab(job.config.vocab_size) / job.layout.tp * job.config.hidden_size
    block = block_elements(job)
    flying = 3 if job.layout.overlap_grad_reduce else 1
    gradients = (1 + flying) * max(ends, *(p.outputs * p.inputs * copies(job, p.met) for p in products))
    weights = max(ends, block) + (block if job.layout.overlap_param_gather else 0)
    return (gradients * job.gradient if zero >= 2 else 0.0) + (weights * job.element if zero == 3 else 0.0)


def _temporary(job: Job) -> float:
    return 2.0 * job.tokens * job.config.hidden_size * job.element * 4 / job.layout.tp


def _in_flight(job: Job) -> float:
    """Chunks of microbatches that the first rank keeps at most."""
    p, m, v, name = job.layout.pp, job.microbatches, job.layout.chunks, job.layout.schedule_name
    if p == 1:
        return v
    most = {"1f1b": p, "zb-h1": p, "zb-h2": 2 * p - 1, "zbv": 2 * p, "v-half": p + 2, "gpipe": m}.get(name, m * v)
    if name == "interleaved":
        most = (v - 1) * p + 2 * (p - 1) + 1
    return min(m * v, most)


def search(
    job: Job, devices: int, place: Place, limit: float, top: int = 10, progress: Progress = lambda _: lambda: None
) -> Found:
    """The best layouts of `job`'s model and batch on `devices` of `place` that need at most `limit` bytes.

    `progress(number of layouts)` gives what is called after each.
    """
    context, every, seen = place.device.context, list(layouts(job, devices, place.device.node)), []
    tick = progress(len(every))
    for j in every:
        seen.append(Candidate(j, step_seconds(j, place), quick_memory(j, context)))
        tick()
    if not seen:
        raise _nothing(job, devices)
    fitting = sorted((c for c in seen if c.memory <= limit), key=lambda c: c.time)
    best = _refined(fitting, place, limit, top)
    rivals = [c for c in fitting if best and shards_weights(c) != shards_weights(best[0])]
    compared = tuple(c for c in _refined(rivals, place, limit, 1) if c.exact)
    nearest = None if best else min(seen, key=lambda c: c.memory)
    known = {c.job: c for c in (*seen, *best, *compared)}
    return Found(len(seen), len(fitting), best, frontier(list(known.values())), compared, nearest)


def _refined(fitting: Sequence[Candidate], place: Place, limit: float, top: int) -> tuple[Candidate, ...]:
    """The fastest ones again from their tables and exact bytes; those that then do not fit fall out."""
    done: list[Candidate] = []
    tried: set[Job] = set()
    for looks, c in enumerate(_varied(fitting)):
        if len(done) >= FINALISTS or looks >= (LOOKS if done else LONGEST_LOOK):
            break
        tried.add(c.job)
        exact = evaluate(c.job, place)
        if exact.memory <= limit:
            done.append(exact)
    done.sort(key=lambda c: c.time)
    worst = done[-1].time if done else 0.0
    rest: list[Candidate] = []
    for c in [c for c in fitting if c.job not in tried and c.time >= worst][:COUNTED]:
        if len(done) + len(rest) >= top:
            break
        there = count(c, place)
        rest += [there] if there.memory <= limit else []
    if rest and not done:
        rest[0] = evaluate(rest[0].job, place)
    return tuple([*done, *rest][:top])


def _varied(fitting: Sequence[Candidate]) -> Iterator[Candidate]:
    """Fastest first, at most two of one tp, cp, pp and microbatch: their neighbours tell nothing new."""
    count: dict[tuple[int, ...], int] = {}
    for c in fitting:
        key = c.job.layout.tp, c.job.layout.cp, c.job.layout.pp, c.job.micro_batch
        count[key] = count.get(key, 0) + 1
        if count[key] <= 2:
            yield c


def count(c: Candidate, place: Place) -> Candidate:
    """A candidate with its bytes from its table."""
    if c.counted:
        return c
    return replace(c, memory=max(b.total for b in plan_memory(c.job, place.device.context)), counted=True)


def evaluate(job: Job, place: Place) -> Candidate:
    """One layout from its table, its bytes exact where they can be."""
    return count(Candidate(job, step_seconds(job, place, exact=True), 0.0, exact=True), place)


def frontier(seen: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both time and memory, from least memory to least time."""
    best, out = inf, []
    for c in sorted(seen, key=lambda c: (c.memory, c.time)):
        if c.time < best * 0.999:
            best = c.time
            out.append(c)
    return tuple(out)


def shards_weights(c: Candidate) -> bool:
    """Whether a layout gathers weights for a moment (ZeRO-3) instead of cutting them."""
    return c.job.layout.zero_stage == 3


def named(layout: Layout) -> str:
    """The axes of a layout, and how its weights are sharded where they are."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp, "dp": layout.dp}
    axes = " x ".join(f"{k} {n}" for k, n in sizes.items() if n > 1 or k in ("tp", "pp", "dp"))
    copies = f" in copies of {layout.zero_shard_size}" if layout.zero_shard_size else ""
    return axes + (f" with ZeRO-{layout.zero_stage}{copies}" if layout.zero_stage > 1 else "")


def why(found: Found) -> str:
    """One sentence on sharded weights (ZeRO-3) against tensor and pipeline parallelism for this model and batch."""
    if not found.best:
        return "No layout fits, so there is nothing to weigh ZeRO-3 against."
    chosen = found.best[0]
    name = named(chosen.job.layout)
    if not found.compared and shards_weights(chosen):
        return f"{name}: no layout that cuts weights fits, so they are sharded and gathered block by block."
    if not found.compared:
        return f"{name}: ZeRO-3 cannot spread this batch over all devices or does not fit, so weights are cut instead."
    other = found.compared[0]
    rival, ratio = named(other.job.layout), chosen.time / other.time
    if ratio < 0.98:
        return f"{name} takes {ratio:.0%} of the time of {rival}, which {_excess(other, chosen)}."
    return f"{name} and {rival} take the same time within 2 %; measure both before the machines are booked for long."


_REASONS = {
    "products": "loses {:.0%} of its step to smaller matrix products",
    "recompute": "fits only by computing again, {:.0%} of its step",
    "tp": "spends {:.0%} of its step more on sums between tensor-parallel ranks",
    "zero3": "waits {:.0%} of its step for weights that every microbatch gathers again",
    "cp": "waits {:.0%} of its step for keys and values of other parts of the sequence",
    "ep": "spends {:.0%} of its step more on sending tokens to their experts",
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
        "tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp, "dp": layout.dp, "vpp": layout.chunks,
        "zero": layout.zero_stage, "zero_shard_size": layout.zero_shard_size, "schedule": layout.schedule_name,
        "sequence_parallel": layout.sequence_parallel, "recompute": recompute_name(layout),
    }  # fmt: skip


def recompute_name(layout: Layout) -> str:
    """The mode, with the number of blocks where it is not all of them."""
    if layout.recompute == "full" and layout.recompute_method == "block":
        return f"full of {layout.recompute_num_layers}"
    return layout.recompute
