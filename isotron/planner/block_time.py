"""Seconds of one block, and of the output layer, for one microbatch on one rank. PURE.

A roofline: matrix products at a fraction of the peak that falls with their sides, everything else at a fraction of the
memory bandwidth, communication at a fraction of the link, and of that what nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

from isotron.planner.efficiency import Fractions, Stack
from isotron.planner.experts import expert_sizes
from isotron.planner.hardware import Hardware
from isotron.planner.job import Job
from isotron.planner.work import attention_flops, block_products, element_traffic, head_product, score_traffic, unread

FORMS = {"16bit": "bfloat16", "fp8": "float8", "fp8-block": "float8", "fp4": "float4", "32bit": "float32"}


@dataclass(frozen=True)
class Place:
    """On what a job runs: device, software, number format of the matrix products."""

    device: Hardware
    stack: Stack
    form: str = "16bit"

    @property
    def fractions(self) -> Fractions:
        """The fitted numbers that apply."""
        return self.stack.of(self.device.name, self.form)


@dataclass(frozen=True)
class Seconds:
    """A step, or a part of it, by kind."""

    products: float = 0.0
    attention: float = 0.0
    elements: float = 0.0
    recompute: float = 0.0
    launches: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    pp: float = 0.0
    zero3: float = 0.0
    dp: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    fixed: float = 0.0

    def values(self) -> tuple[float, ...]:
        """Every kind, in order."""
        return tuple(self.__dict__.values())

    @property
    def total(self) -> float:
        """All kinds."""
        return sum(self.values())

    def scaled(self, by: float) -> Seconds:
        """Every kind times a number."""
        return Seconds(*(x * by for x in self.values()))

    def plus(self, other: Seconds) -> Seconds:
        """Kind by kind."""
        return Seconds(*map(add, self.values(), other.values()))


# ---- one block, one microbatch ---------------------------------------------------------------------------------------


def product_seconds(tokens: float, outputs: int, inputs: int, rate: float, small: float) -> float:
    """One matrix product; the shorter its sides, the less of the device it fills."""
    if not tokens or not outputs or not inputs:
        return 0.0
    return 2 * tokens * outputs * inputs / rate * (1 + small * (1 / tokens + 1 / outputs + 1 / inputs))


def block_seconds(job: Job, place: Place) -> tuple[Seconds, Seconds]:
    """(forward, backward) of one block for one microbatch; what is computed again belongs to the backward."""
    f, device = place.fractions, place.device
    rate = device.peak(FORMS[place.form]) * f.matmul
    products, experts = 0.0, expert_sizes(job.config, job.layout.tp, job.layout.expert_tp)
    for p in block_products(job.config, job.layout.tp, job.layout.expert_tp):
        spread = experts.number if experts and p.met != 1.0 else 1
        tokens = job.tokens * p.met * _met_together(job) / spread if spread > 1 else job.tokens
        one = product_seconds(tokens, p.outputs, p.inputs, rate * (f.experts if spread > 1 else 1), f.small)
        products += one * spread / job.ep if spread > 1 else one
    attention, attention_back = _attention(job, place)
    elements = element_traffic(job) / (device.bandwidth * f.memory)
    forward = Seconds(
        products=products,
        attention=attention,
        elements=elements,
        launches=f.per_layer + (f.per_route if experts else 0.0),
        tp=_tensor_parallel(job, place),
        cp=_context_parallel(job, place),
        ep=_expert_parallel(job, place),
    )
    backward = replace(forward.scaled(2), attention=attention_back, tp=forward.tp, cp=2 * forward.cp, ep=forward.ep)
    return forward, backward.plus(_again(job, forward, place))


def _met_together(job: Job) -> float:
    """How many times a rank's own tokens meet the experts that it holds: those of all ranks that share them."""
    experts = expert_sizes(job.config)
    # whole experts: each tensor-parallel rank sends its own part of the tokens to them
    cut = job.layout.expert_tp if experts and experts.cut else 1
    return job.ep * cut / job.layout.tp


def _again(job: Job, forward: Seconds, place: Place) -> Seconds:
    """What the backward computes again."""
    if job.layout.recompute == "full":
        computing = forward.total - forward.tp - forward.cp - forward.ep
        left_out, blocks = _unread(job, place)
        share = recomputed_share(job)
        # what nothing reads is neither computed nor summed over tensor-parallel ranks: one of a block's two sums
        tp = forward.tp * (1 - blocks / 2)
        return Seconds(recompute=computing - left_out, tp=tp, cp=forward.cp, ep=forward.ep).scaled(share)
    if job.layout.recompute == "selective":
        return Seconds(recompute=0.5 * forward.elements if place.stack.fused_attention else forward.attention)
    return Seconds()


def _unread(job: Job, place: Place) -> tuple[float, float]:
    """(seconds per block that full recompute leaves out, the part of blocks whose last product that is)."""
    c, f = job.config, place.fractions
    blocks = min(1.0, unread(job) / (c.hidden_size * c.ffn))
    rate = place.device.peak(FORMS[place.form]) * f.matmul
    return blocks * product_seconds(job.tokens, c.hidden_size, c.ffn // job.layout.tp, rate, f.small), blocks


def recomputed_share(job: Job) -> float:
    """The blocks of a stage that are computed again under full recompute, as a part of all."""
    layout = job.layout
    if layout.recompute_method != "block":
        return 1.0
    return min(1.0, layout.recompute_num_layers * layout.stages / job.config.num_layers)


def _attention(job: Job, place: Place) -> tuple[float, float]:
    """Scores and values: fused (causal, products only) or with scores in memory (the whole square)."""
    if place.stack.fused_attention:
        forward = attention_flops(job, causal=True) / _attention_rate(place)
        return forward, 2.5 * forward
    return _with_scores(job, place, attention_flops(job, causal=False), job.tokens * job.seq)


def _attention_rate(place: Place) -> float:
    f = place.fractions
    return place.device.peak("bfloat16") * min(1.0, f.matmul if place.form == "16bit" else 0.8) * f.attention


def _with_scores(job: Job, place: Place, flops: float, scores: float) -> tuple[float, float]:
    """Attention whose scores (so many of each head) lie in memory."""
    # a head whose width is no multiple of 8 leaves the tensor cores idle
    full = 0.25 if job.config.head_size % 8 else job.config.head_size / (job.config.head_size + 64)
    rate, bandwidth = _attention_rate(place) * full, place.device.bandwidth * place.fractions.memory
    forward = flops / rate + score_traffic(job, scores, False) / bandwidth
    return forward, 2 * flops / rate + score_traffic(job, scores, True) / bandwidth


def explicit_scores(job: Job, place: Place, queries: float, keys: float) -> tuple[float, float]:
    """(forward, backward) of so many queries that meet so many keys each, probabilities as tensors."""
    c = job.config
    flops = 4.0 * c.num_attention_heads / job.layout.tp * c.head_size * keys * queries
    return _with_scores(job, place, flops, queries * keys)


def _tensor_parallel(job: Job, place: Place) -> float:
    """Two sums of the residual stream per block and pass (or a gather and a scatter each, the same bytes)."""
    t = job.layout.tp
    if t == 1:
        return 0.0
    f, wire = place.fractions, job.tokens * job.config.hidden_size * job.element * (t - 1) / t
    share = f.links if t <= place.device.node else f.network
    return 2 * 2 * wire / (place.device.link(t, 1) * share) * f.exposed_tp


def _context_parallel(job: Job, place: Place) -> float:
    if job.cp == 1:
        return 0.0
    c, f = job.config, place.fractions
    heads = max(1, c.kv_heads / job.layout.tp)
    wire = 2 * heads * c.head_size * job.tokens * job.element * (job.cp - 1)
    share = f.links if job.cp * job.layout.tp <= place.device.node else f.network
    return wire / (place.device.link(job.cp, job.layout.tp) * share) * f.exposed_tp


def _expert_parallel(job: Job, place: Place) -> float:
    experts = expert_sizes(job.config)
    if job.ep == 1 or experts is None:
        return 0.0
    c, f = job.config, place.fractions
    # a token goes once to each rank that has some of its experts
    copies = job.ep * (1 - (1 - 1 / job.ep) ** experts.visits)
    wire = 2 * copies * c.hidden_size * job.tokens / job.layout.tp * job.element * (job.ep - 1) / job.ep
    stride = job.layout.expert_tp  # the expert view is folded anew from the ranks of a stage
    share = f.links if job.ep * stride <= place.device.node else f.network
    return wire / (place.device.link(job.ep, stride) * share) * f.exposed_ep


def head_seconds(job: Job, place: Place) -> tuple[Seconds, Seconds]:
    """The output layer and the loss of one microbatch."""
    f, p = place.fractions, head_product(job.config, job.layout)
    rate = place.device.peak(FORMS["32bit" if place.form == "32bit" else "16bit"]) * min(0.85, f.matmul)
    products = product_seconds(job.output_tokens, p.outputs, p.inputs, rate, f.small)
    traffic = job.output_tokens * p.outputs * 8 / (place.device.bandwidth * f.memory)
    return Seconds(products=products, elements=traffic), Seconds(products=2 * products, elements=traffic)
