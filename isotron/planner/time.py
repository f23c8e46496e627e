"""Seconds of a training step, by what takes them. PURE.

Blocks (`block_time.py`) make stages, stages ranks. The pipeline is the real table, run by its simulator (`exact`), or
its closed form, which a search can afford.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import add, mul
from typing import Any

from isotron.core.parallel.pipeline.simulate import Costs, simulate
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.split import ATTENTION, halves_of, model_costs
from isotron.planner import pair_time, pairs
from isotron.planner.block_time import Place, Seconds, block_seconds, head_seconds
from isotron.planner.experts import number_of_experts
from isotron.planner.job import Job
from isotron.planner.parameters import stage_layers
from isotron.planner.work import block_products

STEP_BYTES = 30  # per element that an optimizer step reads and writes: masters, moments, gradient, weight


Counts = tuple[float, ...]  # blocks of each kind: one kind, or an encoder's and a decoder's
Passes = tuple[Seconds, Seconds]  # forward and backward


@dataclass(frozen=True)
class Units:
    """What stages are made of: a block of each kind, the output layer, and what every stage has in each pass."""

    blocks: tuple[Passes, ...]
    head: Passes
    edge: Seconds

    def stage(self, counts: Counts, last: bool, stages: int = 1) -> Passes:
        """A stage, or several of one rank together, of so many blocks."""
        forward, backward = self.edge.scaled(stages), self.edge.scaled(stages)
        for count, (there, back) in zip(counts, self.blocks, strict=True):
            forward, backward = forward.plus(there.scaled(count)), backward.plus(back.scaled(count))
        return (forward.plus(self.head[0]), backward.plus(self.head[1])) if last else (forward, backward)


@lru_cache(maxsize=4096)
def stage_counts(config: Any, layout: Layout) -> tuple[Counts, ...]:
    """How many blocks of each kind every stage has; a half counts for its part of the multiply-adds."""
    split = stage_layers(config, layout)
    if not getattr(config, "two_streams", False):
        return tuple((_blocks(config, halves_of(split, s)),) for s in range(len(split)))
    encoding = [len(range(layers.start, min(layers.stop, config.encoder_num_layers))) for layers in split]
    return tuple((n, len(layers) - n) for n, layers in zip(encoding, split, strict=True))


def _blocks(config: Any, halves: tuple[str, ...]) -> float:
    if not any(halves):
        return len(halves)
    costs, last = model_costs(config), config.num_layers - 1
    return sum(costs.of(last, half) for half in halves) / costs.blocks[last]


def units(job: Job, place: Place) -> Units:
    """Seconds of the parts of stages, with what they wait for their neighbours and for weights."""
    each = pair_time.block_seconds(job, place) if pairs.are_read(job) else (block_seconds(job, place),)
    blocks = []
    for (forward, backward), elements in zip(each, kinds_elements(job), strict=True):
        gather, scatter = _gathered(job, place, elements, forward.total, backward.total)
        blocks.append((forward.plus(Seconds(zero3=gather)), backward.plus(Seconds(zero3=scatter))))
    return Units(tuple(blocks), head_seconds(job, place), Seconds(pp=_transfer(job, place)))


def stage_seconds(job: Job, place: Place) -> list[Passes]:
    """(forward, backward) of every stage for one microbatch."""
    parts, every = units(job, place), stage_counts(job.config, job.layout)
    return [parts.stage(counts, s == len(every) - 1) for s, counts in enumerate(every)]


def rank_seconds(job: Job, place: Place) -> list[Seconds]:
    """Forward and backward of all stages of every pipeline rank, for one microbatch; equal ranks share a value."""
    parts, every, home = units(job, place), stage_counts(job.config, job.layout), job.layout.placement
    sums: list[tuple[Counts, bool, int]] = [((0,) * len(parts.blocks), False, 0)] * job.layout.pp
    for s, own in enumerate(every):
        counts, last, stages = sums[home[s]]
        sums[home[s]] = tuple(map(add, counts, own)), last or s == len(every) - 1, stages + 1
    made = {key: parts.stage(*key) for key in set(sums)}
    return [made[key][0].plus(made[key][1]) for key in sums]


def _transfer(job: Job, place: Place) -> float:
    """What a stage waits for a tensor of its neighbour."""
    layout, f, device = job.layout, place.fractions, place.device
    if layout.pp == 1:
        return 0.0
    share = layout.tp if layout.sequence_parallel or place.stack.scatter_gather else 1
    # where a decoder begins, the encoder's rows and its own
    tokens = job.micro_batch * sum(pairs.rows(job)) if pairs.are_read(job) else job.tokens
    wire = tokens * job.config.hidden_size * job.residual / share
    stride = layout.tp * job.cp * job.dp
    apart = stride * layout.pp > device.node
    rate = device.outer * f.network if apart else device.inner * f.links
    return wire / rate * f.exposed_pp


def _gathered(job: Job, place: Place, elements: float, forward: float, backward: float) -> tuple[float, float]:
    """ZeRO-2: gradients of a block scattered in every backward; ZeRO-3: its weights gathered in both passes too. The
    excess over computing is waited for.
    """
    if job.layout.zero_stage < 2:
        return 0.0, 0.0
    f, ranks = place.fractions, job.layout.shard_ranks
    share = f.links if ranks * job.layout.tp <= place.device.node else f.network
    rate = place.device.link(ranks, job.layout.tp) * share * ranks / max(1, ranks - 1)
    gather = elements * place.stack.gather_bytes / rate if job.layout.zero_stage == 3 else 0.0
    scatter = gather + elements * place.stack.gradient_bytes / rate

    def waited(wire: float, compute: float) -> float:
        return wire * f.exposed_dp + max(0.0, wire * (1 - f.exposed_dp) - compute)

    return waited(gather, forward), waited(scatter, backward)


def held_elements(job: Job) -> float:
    """Most weights of any pipeline rank, without padding, from the table's shapes."""
    c, layout = job.config, job.layout
    each, every = kinds_elements(job), stage_counts(c, layout)
    held = [0.0] * layout.pp
    home = layout.placement
    for s, rank in enumerate(home):
        held[rank] += sum(map(mul, each, every[s]))
    table = layout.padded_vocab(c.vocab_size) / layout.tp * c.hidden_size
    held[home[0]] += table
    if not (c.tie_embeddings and home[0] == home[-1]):
        held[home[-1]] += table
    return max(held)


def block_elements(job: Job, experts_only: bool = False) -> float:
    """Weights of the last block in matrices, on one rank."""
    found = block_products(job.config, job.layout.tp, job.layout.expert_tp)
    return sum(p.outputs * p.inputs * copies(job, p.met) for p in found if not experts_only or p.met != 1.0)


def kinds_elements(job: Job) -> tuple[float, ...]:
    """Those of a block of each kind."""
    return pair_time.elements(job) if pairs.are_read(job) else (block_elements(job),)


def held_experts(job: Job) -> float:
    """Those of experts among the most weights of a rank."""
    counts = [0] * job.layout.pp
    split = stage_layers(job.config, job.layout)
    for s, rank in enumerate(job.layout.placement):
        counts[rank] += sum(half != ATTENTION for half in halves_of(split, s))
    return max(counts) * block_elements(job, experts_only=True)


def copies(job: Job, met: float) -> float:
    """How many of a product's matrices a rank holds; `met`: the share of tokens that one of them meets."""
    return number_of_experts(job.config) / job.ep if met != 1.0 else 1.0


def data_parallel(job: Job, place: Place) -> float:
    """What the step waits for gradients and weights to meet."""
    layout, ranks = job.layout, job.layout.data_ranks
    if ranks == 1:
        return 0.0
    stack, zero, held = place.stack, layout.zero_stage, held_elements(job)
    shards = layout.shard_ranks
    back = stack.gather_bytes if zero else stack.gradient_bytes
    # what ZeRO-2 and 3 send in every backward counts with the blocks
    once = held * {0: stack.gradient_bytes + back, 1: stack.gradient_bytes + back, 2: back, 3: 0.0}[zero]
    found = _around(job, place, once, shards if zero else ranks, layout.tp)
    copies = ranks // shards if zero else 1
    return found + _around(job, place, 2 * held / shards * stack.gradient_bytes, copies, layout.tp * shards)


def _around(job: Job, place: Place, wire: float, ranks: int, stride: int) -> float:
    """Bytes that go once around `ranks`, `stride` apart, as far as nothing hides them."""
    if ranks == 1:
        return 0.0
    f = place.fractions
    share = f.links if ranks * stride <= place.device.node else f.network
    return wire * (ranks - 1) / ranks / (place.device.link(ranks, stride) * share) * f.exposed_dp


def optimizer_seconds(job: Job, place: Place) -> float:
    """One pass over the state that a rank steps."""
    return held_elements(job) / job.layout.shard_ranks * STEP_BYTES / (place.device.bandwidth * place.fractions.memory)


def step_seconds(job: Job, place: Place, exact: bool = False) -> Seconds:
    """A whole step; `exact` runs the pipeline's table instead of its closed form."""
    ranks = rank_seconds(job, place)
    busiest = max(ranks, key=lambda r: r.total)
    work = busiest.scaled(job.microbatches)
    span = table_span(job, stage_seconds(job, place)) if exact else closed_span(job, [r.total for r in ranks])
    once = Seconds(
        dp=data_parallel(job, place),
        bubble=max(0.0, span - work.total),
        optimizer=optimizer_seconds(job, place),
        fixed=place.fractions.per_step,
    )
    return work.plus(once)


def closed_span(job: Job, ranks: list[float]) -> float:
    """Start of the first to end of the last action, from the published formulas of the schedules."""
    m, v, busiest = job.microbatches, job.layout.chunks, max(ranks)
    name = job.layout.schedule_name
    rest = sum(ranks) - busiest
    if name == "interleaved":
        rest /= v
    elif name in ("zb-h1", "zbv", "v-half", "v-min", "dualpipev"):
        rest *= {"zb-h1": 0.45, "zbv": 0.2, "v-half": 0.5, "v-min": 2 / 3, "dualpipev": 0.15}[name]
    elif name == "zb-h2":
        rest *= 0.1
    return m * busiest + rest


def table_span(job: Job, stages: list[tuple[Seconds, Seconds]]) -> float:
    """The same from the simulated table; microbatches that only repeat its steady part are added."""
    forward = [f.total for f, _ in stages]
    backward = [b.total for _, b in stages]
    costs = Costs(forward, backward, [b.products / 2 for _, b in stages], 0.0)
    ranks = [0.0] * job.layout.pp
    for s, rank in enumerate(job.layout.placement):
        ranks[rank] += forward[s] + backward[s]
    return simulate(job.table(), costs).makespan + (job.microbatches - job.simulated) * max(ranks)
