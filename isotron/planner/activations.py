"""What a microbatch keeps from its forward for its backward, tensor by tensor, per recompute mode. PURE.

Read off the operations of `core/nn` and compared with the bytes that autograd saves. Legend: D hidden, H query heads,
K key/value heads, N head size, F feed-forward, S sequence; local sizes under tensor parallelism. A `Kept` has elements
per token and bytes per element. Kernels that hold more than their inputs and outputs would add to this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from isotron.core.parallel.split import ATTENTION, MLP
from isotron.planner.experts import expert_sizes
from isotron.planner.job import Job
from isotron.planner.kept import IDS, Kept, expert_share, is_latent, latent_attention, routed

_NORM = ("layernorm",)
MASK = 1  # bytes of an element of a dropout mask


@dataclass(frozen=True)
class Sizes:
    """Local widths of one rank."""

    d: float
    h: int
    k: int
    n: int
    f: int
    gated: bool
    rotary: int
    layer_norm: bool
    qk_norm: bool
    parallel: bool
    over_heads: bool  # the norms of queries and keys: one number for all heads
    before: bool  # norms of what attention and MLP read
    after: bool  # norms of what they give
    sums: bool  # these norm the residual stream with it


def sizes(job: Job) -> Sizes:
    """Widths from the layout table (which parameters exist) and the config."""
    return _sizes(job.config, job.layout.tp, job.layout.tp if job.layout.sequence_parallel else 1)


@lru_cache(maxsize=256)  # a search asks for thousands of layouts of one model
def _sizes(c: Any, tp: int, split: int) -> Sizes:
    rules = c.layout(c.vocab_size).rules
    names = {r.pattern for r in rules}
    rotary = int(c.head_size * getattr(c, "rope_percent", 1.0)) if hasattr(c, "rope_theta") else 0
    rotary = c.qk_pos_emb_head_dim if is_latent(c) else rotary
    return Sizes(
        c.hidden_size / split,
        c.num_attention_heads // tp,
        max(1, c.kv_heads // tp),
        c.head_size,
        _mlp_width(c, tp),
        any("gate_up" in name for name in names),
        rotary,
        "*norm*.bias" in names,
        "layers.*.attention.q_norm.weight" in names,
        bool(getattr(c, "parallel_residual", False)),
        any("q_norm" in r.pattern and r.split is not None for r in rules),
        not getattr(c, "norms_after", False),
        getattr(c, "norms_after", False) or "layers.*.mlp_post_norm.weight" in names,
        getattr(c, "norms_of_sums", False),
    )


def _mlp_width(config: Any, tp: int) -> int:
    """Feed-forward elements of one token: of the experts that it visits, where there are experts."""
    experts = expert_sizes(config, tp)
    return int(experts.elements) if experts else int(config.ffn // tp)


def block(job: Job, mode: str, half: str = "") -> list[Kept]:
    """Saved tensors of one block, or a half of it, under a recompute mode ("none", "selective", "full")."""
    z, e = sizes(job), job.element
    wide = job.residual
    if mode == "full":
        x = Kept("block input", z.d, wide)
        return [replace(x, elements=x.elements / job.layout.tp)] if job.layout.distribute_saved_activations else [x]
    x = Kept("block input", z.d, wide if z.before else e)  # what no norm reads is narrowed first
    modules = job.layout.recompute_modules if mode == "selective" else ()
    modules = (*modules, "mlp") if job.layout.mlp_chunks > 1 else modules
    norm = [Kept("norm output", z.d, e, _NORM), _statistics(z, job)] if z.before else []
    after = [Kept("branch output", z.d, e), replace(_statistics(z, job), parts=())] if z.after else []
    hidden = [Kept("dropout mask", z.d, MASK)] if job.config.dropout[0] > 0 else []
    up = Kept("MLP up", (2 if z.gated else 1) * z.f, e)
    share = expert_share(job.config)  # of the blocks; the others have one MLP
    plain = [up, Kept("activation output", z.f, e, ("moe_act",))]
    inside = [*norm, *plain] if not share else _mixed(job, norm, share)
    apart = z.before or z.sums
    if z.after and not apart:  # then its recomputed unit has the norm in it
        inside += after
    again = [replace(t, parts=(*t.parts, "mlp")) for t in inside]
    mlp = [*again, *(after if apart else []), *hidden]
    middle = [] if z.parallel else [replace(x, name="residual")]
    first = [x, *norm, *_attention(job, z, "core_attn" in modules), *after, *hidden]
    kept = first if half == ATTENTION else [*middle, *mlp] if half == MLP else [*first, *middle, *mlp]
    return [t for t in kept if not set(modules) & set(t.parts)]


def _mixed(job: Job, norm: list[Kept], share: float) -> list[Kept]:
    """Norm and MLP of an average block of a model in which a share of the blocks has experts; these keep the norm."""
    c, e, tp = job.config, job.element, job.layout.tp
    width = c.ffn / tp
    one = [*norm, Kept("MLP up", 2 * width, e), Kept("activation output", width, e, ("moe_act",))]
    many = [*(replace(t, parts=()) for t in norm), *routed(c, c.hidden_size, tp, job.seq, e, job.wide)]
    return [*(t.times(1 - share) for t in one), *(t.times(share) for t in many)]


def _statistics(z: Sizes, job: Job) -> Kept:
    # float32 for RMSNorm; the mean and deviation of torch's LayerNorm have the dtype of its input on the CPU
    return (
        Kept("norm statistics", 2, job.residual, _NORM) if z.layer_norm else Kept("norm statistics", 1, job.wide, _NORM)
    )


def _attention(job: Job, z: Sizes, again: bool) -> list[Kept]:
    """Projections and the core: a fused kernel without dropout, explicit probabilities with it."""
    if is_latent(job.config):
        return latent_attention(job.config, z.h, job.element, job.wide)
    e, wide, out = job.element, job.wide, Kept("attention output", z.h * z.n, job.element)
    qkv = Kept("q, k, v", (z.h + 2 * z.k) * z.n, e)
    turned = Kept("rotated q, k", (z.h + z.k) * z.n, e)
    norms = [Kept("q, k norm statistics", 2 if z.over_heads else z.h + z.k, wide)] if z.qk_norm else []
    given = getattr(job.config, "softmax_type", "vanilla") != "vanilla"
    sinks = [Kept("sinks", z.h / job.tokens, e)] if given else []
    tiled = given or getattr(job.config, "attn_logit_softcapping", 0.0) > 0  # tiles keep no probabilities
    explicit = job.config.dropout[1] > 0 and not tiled
    if not explicit or again:
        fused = [] if explicit else [Kept("log-sum-exp", z.h, wide)]
        return [qkv, *norms, *([turned] if z.rotary or z.qk_norm else []), *sinks, *fused, out]
    keys = job.seq
    return [
        *([qkv, *norms] if z.qk_norm else []),
        Kept("scaled q and repeated k, v", 3 * z.h * z.n, e),
        *([Kept("causal mask", keys / job.micro_batch, MASK)] if getattr(job.config, "causal", True) else []),
        Kept("probabilities", z.h * keys, wide),
        Kept("probability dropout mask", z.h * keys, MASK),
        Kept("dropped probabilities", z.h * keys, e),
        out,
    ]


def ends(job: Job, first: bool, last: bool, blocks_full: bool) -> list[Kept]:
    """Saved tensors of a stage beside its blocks: token ids and masks, angles, the last norm, the loss's gradient."""
    z, e, c, split = sizes(job), job.element, job.config, job.layout.tp > 1
    names, kept = {r.pattern for r in c.layout(c.vocab_size).rules}, []
    if z.rotary and not blocks_full:
        kept.append(Kept("angles", z.rotary, e))
        if getattr(c, "rope_local_theta", 0.0):
            kept.append(Kept("angles of blocks with a window", z.rotary, e))
    if first:
        kept.append(Kept("token ids", 1, IDS))
        if split:
            kept.append(Kept("ids held elsewhere", 1, MASK))
        if "positions.weight" in names:
            share = z.d / c.hidden_size  # its own part of the sequence, the same for every row of a batch
            kept.append(Kept("position ids", share / job.micro_batch, IDS))
        if "types.weight" in names:
            kept.append(Kept("types", 1, IDS))
        if z.sums:
            kept += [Kept("sum of embeddings", z.d, e), replace(_statistics(z, job), parts=())]
        if c.dropout[0] > 0:
            kept.append(Kept("dropout mask", z.d, MASK))
    if last:
        statistics = Kept("norm statistics", 2, job.residual) if z.layer_norm else Kept("norm statistics", 1, job.wide)
        kept += [Kept("last block's output", z.d, job.residual), statistics, Kept("loss gradient", c.hidden_size, e)]
        kept += _transformed(job, z) if "transform.weight" in names else []
    return kept


def _transformed(job: Job, z: Sizes) -> list[Kept]:
    """What a layer before the output layer and the norm behind it keep besides, and the gradient of a bias."""
    e, rows = job.element, job.layout.padded_vocab(job.config.vocab_size) // job.layout.tp
    norm = [] if z.sums else [Kept("final norm output", z.d, e), Kept("final norm statistics", 2, e)]
    bias = Kept("gradient of the output layer's bias", rows / job.tokens, job.wide)
    return [*norm, Kept("transform output", z.d, e), Kept("transform activation", z.d, e), bias]


def block_bytes(job: Job, mode: str | None = None) -> float:
    """Bytes that one block keeps of one microbatch; of a recomputed unit of several blocks, its share of the input."""
    layout = job.layout
    mode = layout.recompute if mode is None else mode
    per_token = sum(t.bytes for t in block(job, mode))
    share = layout.recompute_num_layers if mode == "full" else 1
    return per_token * job.tokens / share


def stage_bytes(job: Job, blocks: int | Sequence[str], first: bool, last: bool, mode: str | None = None) -> float:
    """Bytes that a stage keeps of one microbatch. `blocks`: how many, or what it has of each (`split.halves_of`)."""
    mode = job.layout.recompute if mode is None else mode
    held = ("",) * blocks if isinstance(blocks, int) else blocks
    n, method = job.layout.recompute_num_layers, job.layout.recompute_method
    modes = [(mode, held)]
    if mode == "full":  # a unit keeps one input
        modes = [(mode, held[::n])] if method == "uniform" else [(mode, held[:n]), ("none", held[n:])]
    everything = mode == "full" and (method == "uniform" or n >= len(held))
    own = sum(_kept(job, how, some) for how, some in modes)
    if job.layout.cpu_offloading and held:
        own *= _kept(job, mode, held[job.layout.cpu_offloading_num_layers or len(held) :]) / _kept(job, mode, held)
    return (own + sum(t.bytes for t in ends(job, first, last, everything))) * job.tokens


def _kept(job: Job, mode: str, held: Sequence[str]) -> float:
    """Bytes per token of some blocks and halves."""
    return sum(sum(t.bytes for t in block(job, mode, half)) * held.count(half) for half in set(held))


def describe(config: Any, job: Job) -> dict[str, float]:
    """Bytes per token of one block by tensor, for a report."""
    found: dict[str, float] = {}
    for t in block(job, job.layout.recompute):
        found[t.name] = found.get(t.name, 0.0) + t.bytes
    return found
