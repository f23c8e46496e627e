"""Rules on context parallelism and attention kernels: what can be cut how, and which kernel can do what. PURE."""

from __future__ import annotations

from math import prod

from isotron.config.rules import Facts, Rule, asked, moved
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem

TYPES = ("p2p", "allgather", "a2a", "a2a+p2p")


def _sequence(c: RunConfig, f: Facts) -> Problem:
    s, cp = c.data.seq_length, c.layout.cp
    near = max(s // (2 * cp), 1) * 2 * cp
    case = f"every rank holds two of 2 x cp = {2 * cp} equal chunks of a sequence, and {s} / {2 * cp} = {s / 2 / cp:g}"
    return Problem(asked(c, "cp", "seq_length"), case, f"--seq-length {near}, or --cp 1")


def _types_broken(c: RunConfig, f: Facts) -> bool:
    given = c.layout.cp_comm_type
    return len(given) not in (1, c.model.num_layers) or any(t not in TYPES for t in given)


def _types(c: RunConfig, f: Facts) -> Problem:
    given, layers = c.layout.cp_comm_type, c.model.num_layers
    wrong = [t for t in given if t not in TYPES]
    case = f"the types are {', '.join(TYPES)}"
    if not wrong:
        case = f"it names one type for all layers, or one for each of {layers}; given are {len(given)}"
    return Problem(asked(c, "cp_comm_type", *([] if wrong else ["num_layers"])), case, "--cp-comm-type p2p")


def _inner(c: RunConfig) -> int:
    """Most ranks that the heads of a layer are dealt to."""
    given, sizes = c.layout.cp_comm_type, c.layout.hierarchical_cp_sizes
    return max(c.layout.cp if "a2a" in given else 1, sizes[0] if "a2a+p2p" in given and sizes else 1)


def _heads(c: RunConfig, f: Facts) -> Problem:
    heads, n = c.model.num_attention_heads // c.layout.tp, _inner(c)
    case = f"an all-to-all deals the {heads} query heads of a rank to {n} ranks, and {heads} / {n} = {heads / n:g}"
    given = asked(c, "cp", "cp_comm_type", "num_attention_heads", *moved(c, "tp", "hierarchical_cp_sizes"))
    levels = f"--cp-comm-type a2a+p2p --hierarchical-cp-sizes 1,{c.layout.cp}"
    return Problem(given, case, levels if c.layout.hierarchical_cp_sizes else "--cp-comm-type p2p")


def _levels_broken(c: RunConfig, f: Facts) -> bool:
    sizes = c.layout.hierarchical_cp_sizes
    if "a2a+p2p" not in c.layout.cp_comm_type or c.layout.cp == 1:
        return False
    return len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != c.layout.cp


def _levels(c: RunConfig, f: Facts) -> Problem:
    cp = c.layout.cp
    a = next((n for n in (2, 3, 5, 7) if cp % n == 0), cp)
    case = f"a2a+p2p needs two sizes, ranks of an all-to-all and of a ring, whose product is cp {cp}"
    given = asked(c, "cp_comm_type", "hierarchical_cp_sizes", "cp")
    return Problem(given, case, f"--hierarchical-cp-sizes {a},{cp // a}")


def _unused_levels(c: RunConfig, f: Facts) -> Problem:
    case = "only a2a+p2p has two levels"
    return Problem(asked(c, "hierarchical_cp_sizes", "cp_comm_type"), case, "--cp-comm-type a2a+p2p, or without them")


def _kernel_of_dropout(c: RunConfig, f: Facts) -> Problem:
    case = "its kernels cannot drop attention probabilities by place, so that every layout drops the same"
    given = asked(c, "attention_backend", "attention_dropout")
    return Problem(given, case, "--attention-backend unfused, or --attention-dropout 0.0")


_HEADS = ("cp", "cp_comm_type", "hierarchical_cp_sizes", "num_attention_heads", "tp")
CONTEXT_RULES: tuple[Rule, ...] = (
    Rule("cp divides the sequence", ("cp", "seq_length"),
         lambda c, f: c.layout.cp > 1 and c.data.seq_length % (2 * c.layout.cp) != 0, _sequence),
    Rule("types of cp", ("cp_comm_type", "num_layers"), _types_broken, _types),
    Rule("cp divides heads", _HEADS,
         lambda c, f: c.layout.cp > 1 and c.model.num_attention_heads % c.layout.tp == 0
         and (c.model.num_attention_heads // c.layout.tp) % max(_inner(c), 1) != 0, _heads),
    Rule("levels of cp", ("cp", "cp_comm_type", "hierarchical_cp_sizes"), _levels_broken, _levels),
    Rule("kernels that can drop", ("attention_backend", "attention_dropout"),
         lambda c, f: c.layout.attention_backend in ("flash", "fused") and c.model.attention_dropout > 0,
         _kernel_of_dropout),
    Rule("levels are used", ("cp_comm_type", "hierarchical_cp_sizes"),
         lambda c, f: bool(c.layout.hierarchical_cp_sizes) and "a2a+p2p" not in c.layout.cp_comm_type, _unused_levels),
)  # fmt: skip
