"""Seconds of a block of an encoder and of one of a decoder beside it, for one microbatch on one rank. PURE.

The roofline of `block_time.py`, each block over the tokens of its own rows; a decoder's reads the encoder's too. Scores
have a bias that is trained, so probabilities are tensors whatever the stack fuses. No published run of such a model
stands behind it: efficiencies are those that decoders of the stack reached.
"""

from __future__ import annotations

from dataclasses import replace

from isotron.planner.block_time import FORMS, Place, Seconds, product_seconds, recomputed_share
from isotron.planner.block_time import explicit_scores as core
from isotron.planner.job import Job
from isotron.planner.pairs import rows
from isotron.planner.work import Product, named_products, unread

CROSS = "cross."
READ = "cross.kv.weight"  # the matrix that meets what the encoder gave


def products(job: Job, decodes: bool) -> list[tuple[float, Product]]:
    """(tokens of a microbatch, matrix) of a block on one rank."""
    source, target = (job.micro_batch * n for n in rows(job))
    own = target if decodes else source
    found = named_products(job.config, job.layout.tp, job.layout.expert_tp)
    return [(source if n == READ else own, p) for n, p in found.items() if decodes or not n.startswith(CROSS)]


def elements(job: Job) -> tuple[float, float]:
    """Weights in the matrices of a block of the encoder, and of the decoder, on one rank."""
    return tuple(float(sum(p.outputs * p.inputs for _, p in products(job, d))) for d in (False, True))  # type: ignore[return-value]


def block_seconds(job: Job, place: Place) -> tuple[tuple[Seconds, Seconds], ...]:
    """(forward, backward) of a block of the encoder, and of one of the decoder."""
    return _block(job, place, False), _block(job, place, True)


def _block(job: Job, place: Place, decodes: bool) -> tuple[Seconds, Seconds]:
    f, device = place.fractions, place.device
    source, target = rows(job)
    queries = job.micro_batch * (target if decodes else source)
    keys = target + source if decodes else source  # a decoder's block looks at its own rows and at the encoder's
    rate = device.peak(FORMS[place.form]) * f.matmul
    attention, attention_back = core(job, place, queries, keys)
    forward = Seconds(
        products=sum(product_seconds(n, p.outputs, p.inputs, rate, f.small) for n, p in products(job, decodes)),
        attention=attention,
        elements=_traffic(job, queries, decodes) / (device.bandwidth * f.memory),
        launches=f.per_layer * (1.5 if decodes else 1.0),
        tp=_sums(job, place, queries, decodes),
    )
    backward = replace(forward.scaled(2), attention=attention_back, tp=forward.tp)
    return forward, backward.plus(_again(job, place, forward, queries))


def _traffic(job: Job, queries: float, decodes: bool) -> float:
    """Bytes that norms, residuals and activations read and write in a forward; a decoder's block has one part more."""
    c, tp = job.config, job.layout.tp
    share = tp if job.layout.sequence_parallel else 1
    return float(((15 if decodes else 10) * c.hidden_size / share + (2 + c.gated) * c.ffn / tp) * job.element * queries)


def _sums(job: Job, place: Place, queries: float, decodes: bool) -> float:
    """A sum of the residual stream behind attention and MLP, behind cross-attention too; there what the encoder gave is
    gathered, and its gradient scattered, which is half of a sum.
    """
    t = job.layout.tp
    if t == 1:
        return 0.0
    f, read = place.fractions, job.micro_batch * rows(job)[0] if decodes else 0
    tokens = 2 * (3 if decodes else 2) * queries + read
    share = f.links if t <= place.device.node else f.network
    wire = tokens * job.config.hidden_size * job.element * (t - 1) / t
    return wire / (place.device.link(t, 1) * share) * f.exposed_tp


def _again(job: Job, place: Place, forward: Seconds, queries: float) -> Seconds:
    """What the backward computes again."""
    c, f, recompute = job.config, place.fractions, job.layout.recompute
    if recompute == "selective":
        return Seconds(recompute=forward.attention if "core_attn" in job.layout.recompute_modules else 0.0)
    if recompute != "full":
        return Seconds()
    blocks = min(1.0, unread(job) / (c.hidden_size * c.ffn))
    rate = place.device.peak(FORMS[place.form]) * f.matmul
    left_out = blocks * product_seconds(queries, c.hidden_size, c.ffn // job.layout.tp, rate, f.small)
    again = Seconds(recompute=forward.total - forward.tp - left_out, tp=forward.tp * (1 - blocks / 2))
    return again.scaled(recomputed_share(job))
