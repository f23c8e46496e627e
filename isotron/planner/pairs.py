"""What an encoder and a decoder keep of a microbatch from forward to backward, per recompute mode. PURE.

Read off `nn/cross.py` and `nn/encoder_decoder.py`, and compared with the bytes that autograd saves. Legend as in
`activations.py`; E tokens of a row of the encoder, S of the decoder. Scores have a bias, so probabilities are kept.
"""

from __future__ import annotations

from typing import Any

from isotron.planner.job import Job
from isotron.planner.kept import IDS, Kept

MASK = 1  # bytes of an element of a mask


def are_read(job: Job) -> bool:
    """Whether the family has an encoder and a decoder."""
    return bool(getattr(job.config, "two_streams", False))


def rows(job: Job) -> tuple[int, int]:
    """Tokens of a row of the encoder, and of the decoder; the same twice for other families."""
    return job.seq, getattr(job.config, "decoder_seq_length", 0) or job.seq


def _local(job: Job) -> tuple[float, int, int, int]:
    """Width of the residual stream, heads, their size and MLP width, as one rank has them."""
    c, tp = job.config, job.layout.tp
    split = tp if job.layout.sequence_parallel else 1
    return c.hidden_size / split, c.num_attention_heads // tp, c.head_size, c.ffn // tp


def _norm(job: Job) -> list[Kept]:
    """What a norm leaves behind."""
    d = _local(job)[0]
    return [Kept("norm output", d, job.element, ("layernorm",)), Kept("norm statistics", 1, job.wide, ("layernorm",))]


def _scores(job: Job, keys: float, causal: bool) -> list[Kept]:
    """Explicit probabilities over so many keys, per query."""
    _, h, n, _ = _local(job)
    e, dropped = job.element, job.config.dropout[1] > 0
    mask = [Kept("causal mask", keys / job.micro_batch, MASK)] if causal else []
    narrow = [Kept("probabilities in 16 bits", h * keys, e)] if e < job.wide and not dropped else []
    after = [Kept("probability dropout mask", h * keys, MASK), Kept("dropped probabilities", h * keys, e)]
    found = [*mask, Kept("probabilities", h * keys, job.wide), *narrow, *(after if dropped else [])]
    again = [Kept(t.name, t.elements, t.size, ("core_attn",)) for t in found]
    return [*again, Kept("attention output", h * n, e)]


def _mlp(job: Job) -> list[Kept]:
    f, e, gated = _local(job)[3], job.element, job.config.gated
    up = [Kept("MLP up", 2 * f, e)] if gated else []
    out = Kept("activation output", f, e, ("moe_act",))
    # the backward of relu reads its result, so that sparing it keeps what went in
    spared = [] if gated else [Kept("MLP up", f, e, ("unless moe_act",))]
    again = [*_norm(job), *up, *spared, out]
    return [Kept(t.name, t.elements, t.size, (*t.parts, "mlp")) for t in again]


def block(job: Job, decodes: bool, mode: str) -> tuple[list[Kept], list[Kept]]:
    """Saved tensors of a block per token of its own rows, and per token of the encoder's."""
    d, h, n, _ = _local(job)
    e, (source, target) = job.element, rows(job)
    x = Kept("block input", d, e)
    if mode == "full":
        return [x], []
    dropout = [Kept("dropout mask", d, MASK)] if job.config.dropout[0] > 0 else []
    own = target if decodes else source
    kept = [x, *_norm(job), Kept("q, k, v", 3 * h * n, e), *_scores(job, own, decodes), *dropout]
    across: list[Kept] = []
    if decodes:
        kept += [Kept("residual", d, e), *_norm(job), Kept("q", h * n, e), *_scores(job, source, False), *dropout]
        across = [Kept("k, v", 2 * h * n, e)]
    kept += [Kept("residual", d, e), *_mlp(job), *dropout]
    modules = set(job.layout.recompute_modules if mode == "selective" else ())
    modules |= {"mlp"} if job.layout.mlp_chunks > 1 else set()
    absent = {"unless moe_act"} if "moe_act" not in modules else set()
    return [t for t in kept if not (modules | absent) & set(t.parts)], across


def _ends(job: Job, layers: range, first: bool, last: bool, mode: str) -> tuple[list[Kept], list[Kept], float]:
    """Beside the blocks: per token of the encoder's rows, of the decoder's, and bytes that no token counts."""
    c, e, split = job.config, job.element, job.layout.tp > 1
    d, (source, target) = _local(job)[0], rows(job)
    names = set(c.ends_of(layers, first, last))
    ids = [Kept("token ids", 1, IDS), *([Kept("ids held elsewhere", 1, MASK)] if split else [])]
    ids += [Kept("dropout mask", d, MASK)] if c.dropout[0] > 0 else []
    norm = [Kept("last block's output", d, e), Kept("norm statistics", 1, job.wide)]
    read = [*(ids if "dropout" in names else []), *(norm if "encoder_norm" in names else [])]
    decodes = "decoder_bias" in names
    read += [Kept("what the encoder gave", d, e)] if decodes else []
    written = [*(ids if "decoder_dropout" in names else [])]
    written += [*norm, Kept("loss gradient", c.hidden_size, e)] if last else []
    padding = [Kept("padding", 1, MASK)] if layers else []
    # of distances and, where scores are formed again, the bias itself
    size = IDS + _local(job)[1] * e * _scores_again(job, mode)
    return [*read, *padding], written, float(size * (source**2 * ("encoder_bias" in names) + target**2 * decodes))


def _scores_again(job: Job, mode: str) -> bool:
    return mode == "full" or (mode == "selective" and "core_attn" in job.layout.recompute_modules)


def stage_bytes(job: Job, layers: range, first: bool, last: bool, mode: str | None = None) -> float:
    """Bytes that a stage keeps of one microbatch."""
    mode, layout = job.layout.recompute if mode is None else mode, job.layout
    middle, per_pair = job.config.encoder_num_layers, job.micro_batch
    source, target = rows(job)
    read, written, fixed = _ends(job, layers, first, last, mode)
    total = fixed + per_pair * (source * _bytes(read) + target * _bytes(written))
    for place, i in enumerate(layers):
        own, across = block(job, i >= middle, _mode_of(layout, place, mode))
        share = 1.0
        if mode == "full" and layout.recompute_method == "uniform":
            start = max(layers.start, middle) if i >= middle else layers.start
            share = float((i - start) % layout.recompute_num_layers == 0)
        total += share * per_pair * ((target if i >= middle else source) * _bytes(own) + source * _bytes(across))
    return total


def unit_bytes(job: Job) -> float:
    """What the fullest unit under full recompute holds while its backward runs, beside its input."""
    found = []
    for decodes, tokens in zip((False, True), rows(job), strict=True):
        own, across = block(job, decodes, "none")
        inside = tokens * (_bytes(own) - own[0].bytes) + rows(job)[0] * _bytes(across)
        found.append(job.micro_batch * inside)
    return max(found) * job.layout.recompute_num_layers


def _mode_of(layout: Any, place: int, mode: str) -> str:
    """Under full recompute by block only the first blocks of a stage are computed again."""
    if mode == "full" and layout.recompute_method == "block" and place >= layout.recompute_num_layers:
        return "none"
    return mode


def _bytes(kept: list[Kept]) -> float:
    return sum(t.bytes for t in kept)
