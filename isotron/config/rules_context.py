"""Rules on context parallelism and attention kernels: what can be cut how, and which kernel can do what. PURE."""

from __future__ import annotations

from math import lcm, prod

from isotron.config.rules import Facts, Rule, asked, moved
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem
from isotron.core.parallel.deal import largest_group
from isotron.core.parallel.pipeline.tables import is_file

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
    whole = lcm(c.layout.cp, largest_group(c.layout.data_ranks)) if c.layout.hybrid_context_parallel else c.layout.cp
    return max(whole if "a2a" in given else 1, sizes[0] if "a2a+p2p" in given and sizes else 1)


def _heads(c: RunConfig, f: Facts) -> Problem:
    heads, n = c.model.num_attention_heads // c.layout.tp, _inner(c)
    case = f"an all-to-all deals the {heads} query heads of a rank to {n} ranks, and {heads} / {n} = {heads / n:g}"
    dealt = ("dp", "hybrid_context_parallel") if c.layout.hybrid_context_parallel else ()
    given = asked(c, "cp", *dealt, "cp_comm_type", "num_attention_heads", *moved(c, "tp", "hierarchical_cp_sizes"))
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


def _against_hybrid(c: RunConfig) -> dict[str, tuple[bool, str]]:
    """What does not go with documents that are dealt anew: leaf -> (whether it is asked for, what would do)."""
    m, layout = c.model, c.layout
    balance = getattr(m, "moe_router_load_balancing_type", "")
    together = layout.ep > 1 or layout.expert_tp != layout.tp
    return {
        "schedule": (is_file(layout.schedule), "--schedule auto"),
        "cp_comm_type": ("a2a+p2p" in layout.cp_comm_type, "--cp-comm-type a2a"),
        "moe_token_dispatcher_type": (
            together and layout.moe_token_dispatcher_type == "allgather", "--moe-token-dispatcher-type alltoall"
        ),
        "moe_router_load_balancing_type": (
            balance == "sinkhorn" or (balance == "batch" and getattr(m, "moe_aux_loss_coeff", 0) != 0),
            "--moe-router-load-balancing-type sequence",
        ),
        "moe_expert_capacity_factor": (
            getattr(m, "moe_expert_capacity_factor", 0) > 0, "--moe-expert-capacity-factor 0.0"
        ),
        "rope_scaling": (getattr(m, "rope_scaling", "") in ("dynamic", "longrope"), "--rope-scaling yarn"),
    }  # fmt: skip


def _hybrid_beside(c: RunConfig, f: Facts) -> Problem:
    wrong = {leaf: fix for leaf, (here, fix) in _against_hybrid(c).items() if here}
    case = "documents are dealt anew to groups of ranks, a number of microbatches that no file can know: "
    case += "one level of them, and nothing that looks at a whole row or at a microbatch as they were"
    return Problem(asked(c, "hybrid_context_parallel", *wrong), case, " ".join(dict.fromkeys(wrong.values())))


def _hybrid_slots(c: RunConfig) -> tuple[int, int]:
    """(most slots of a rank, ranks of the largest group)."""
    layout = c.layout
    return layout.max_seqlen_per_dp_cp_rank or -(-c.data.seq_length // layout.cp), largest_group(layout.data_ranks)


def _hybrid_long(c: RunConfig, f: Facts) -> Problem:
    s, (most, ranks) = c.data.seq_length, _hybrid_slots(c)
    case = f"a document of {s} tokens is dealt to at most {ranks} of dp x cp ranks, {most} slots each"
    given = asked(c, "max_seqlen_per_dp_cp_rank", "seq_length", "cp", "dp")
    return Problem(given, case, f"--max-seqlen-per-dp-cp-rank {-(-s // ranks)}")


def _costs_broken(c: RunConfig, f: Facts) -> bool:
    given, most = c.layout.hybrid_costs, c.layout.max_seqlen_per_dp_cp_rank
    if not c.layout.hybrid_context_parallel:
        return bool(given or most)
    return bool(given) and (len(given) not in (2, 3, 4) or min(given) <= 0)


def _hybrid_unused(c: RunConfig, f: Facts) -> Problem:
    given = moved(c, "max_seqlen_per_dp_cp_rank", "hybrid_costs")
    case = "only documents that are dealt anew have them, two to four numbers above 0 for the costs"
    fix = "--hybrid-context-parallel --hybrid-costs 1.0,0.001"
    return Problem(asked(c, *given, "hybrid_context_parallel"), case, fix)


_HYBRID = (
    "hybrid_context_parallel schedule cp_comm_type ep etp moe_token_dispatcher_type moe_router_load_balancing_type "
    "moe_aux_loss_coeff moe_expert_capacity_factor rope_scaling"
)
_HEADS = ("cp", "dp", "hybrid_context_parallel", "cp_comm_type", "hierarchical_cp_sizes", "num_attention_heads", "tp")
CONTEXT_RULES: tuple[Rule, ...] = (
    Rule("cp divides the sequence", ("cp", "seq_length"),
         lambda c, f: c.layout.cp > 1 and c.data.seq_length % (2 * c.layout.cp) != 0, _sequence),
    Rule("types of cp", ("cp_comm_type", "num_layers"), _types_broken, _types),
    Rule("cp divides heads", _HEADS,
         lambda c, f: (c.layout.cp > 1 or c.layout.hybrid_context_parallel)
         and c.model.num_attention_heads % c.layout.tp == 0
         and (c.model.num_attention_heads // c.layout.tp) % max(_inner(c), 1) != 0, _heads),
    Rule("documents dealt anew", tuple(_HYBRID.split()),
         lambda c, f: c.layout.hybrid_context_parallel and any(here for here, _ in _against_hybrid(c).values()),
         _hybrid_beside),
    Rule("documents fit their groups", ("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank", "seq_length", "cp"),
         lambda c, f: c.layout.hybrid_context_parallel and prod(_hybrid_slots(c)) < c.data.seq_length, _hybrid_long),
    Rule("costs of documents", ("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank", "hybrid_costs"),
         _costs_broken, _hybrid_unused),
    Rule("levels of cp", ("cp", "cp_comm_type", "hierarchical_cp_sizes"), _levels_broken, _levels),
    Rule("kernels that can drop", ("attention_backend", "attention_dropout"),
         lambda c, f: c.layout.attention_backend in ("flash", "fused") and c.model.attention_dropout > 0,
         _kernel_of_dropout),
    Rule("levels are used", ("cp_comm_type", "hierarchical_cp_sizes"),
         lambda c, f: bool(c.layout.hierarchical_cp_sizes) and "a2a+p2p" not in c.layout.cp_comm_type, _unused_levels),
)  # fmt: skip
