"""Rules about mixtures of experts. PURE. A model without experts satisfies them all."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from isotron.config.rules import Facts, Rule, asked, moved, nearest_divisor
from isotron.config.schema import RunConfig, value
from isotron.core.errors import Problem, Refused
from isotron.core.nn.moe_config import MoEConfig, layer_pattern


def _moe(c: RunConfig) -> MoEConfig | None:
    return c.model if isinstance(c.model, MoEConfig) else None


def _of(test: Callable[[RunConfig, MoEConfig], bool]) -> Callable[[RunConfig, Facts], bool]:
    """A predicate about models with experts."""

    def broken(c: RunConfig, f: Facts) -> bool:
        m = _moe(c)
        return m is not None and test(c, m)

    return broken


def _problem(leaves: str, fix: str, case: Callable[[RunConfig], str]) -> Callable[[RunConfig, Facts], Problem]:
    return lambda c, f: Problem(asked(c, *leaves.split()), case(c), fix)


def _pattern_broken(c: RunConfig, m: MoEConfig) -> bool:
    try:
        layer_pattern(m.moe_layer_freq, c.model.num_layers)
    except Refused:
        return True
    return False


def _pattern(c: RunConfig, f: Facts) -> Problem:
    m, layers = _moe(c), c.model.num_layers
    try:
        layer_pattern(m.moe_layer_freq if m else "1", layers)
        case = ""
    except Refused as error:
        case = error.problems[0].case
    return Problem(asked(c, "moe_layer_freq", "num_layers"), case, f"--moe-layer-freq [1]*{layers}")


def _topk(c: RunConfig, f: Facts) -> Problem:
    e = value(c, "num_experts")
    case = f"a token visits different experts, and there are {e}"
    return Problem(asked(c, "moe_router_topk", "num_experts"), case, f"--moe-router-topk {e}")


def _groups_broken(c: RunConfig, m: MoEConfig) -> bool:
    groups, chosen = m.moe_router_num_groups, m.moe_router_group_topk
    if not groups:
        return chosen > 0 or m.moe_router_group_scores > 0
    if m.num_experts % groups or not 1 <= chosen <= groups:
        return True
    inside = m.num_experts // groups
    return chosen * inside < m.moe_router_topk or m.moe_router_group_scores > inside


def _groups(c: RunConfig, f: Facts) -> Problem:
    m = _moe(c)
    leaves = "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores", "num_experts"
    case = (
        "experts are dealt to equal groups, a token chooses among those of 1 or more groups that hold at least topk "
        "experts, and a group is ranked by at most all of its scores"
    )
    groups = nearest_divisor(m.num_experts, m.moe_router_num_groups) if m and m.moe_router_num_groups else 0
    fix = f"--moe-router-num-groups {groups} --moe-router-group-topk {groups} --moe-router-group-scores 0"
    return Problem(asked(c, *leaves), case, fix)


def _width(c: RunConfig, f: Facts) -> Problem:
    m, tp, etp = _moe(c), c.layout.tp, c.layout.expert_tp
    f_e, f_s = (m.expert_width, m.shared_width) if m else (0, 0)
    case = f"an expert of width {f_e} is split over {etp} ranks, and the shared one of width {f_s} over {tp}"
    fix = f"--moe-ffn-hidden-size {-(-f_e // etp) * etp} --moe-shared-expert-intermediate-size {-(-f_s // tp) * tp}"
    given = asked(c, "tp", *moved(c, "etp"), "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return Problem(given, case, fix)


def _stage_ranks(c: RunConfig) -> int:
    """Ranks that hold a part of the same blocks."""
    return c.layout.tp * c.layout.data_ranks


def _fold(c: RunConfig, f: Facts) -> Problem:
    n = _stage_ranks(c)
    etp = nearest_divisor(n, c.layout.expert_tp)
    case = (
        f"the tp x cp x dp = {n} ranks of a pipeline stage are folded into etp x ep x copies, and "
        f"{c.layout.expert_tp} x {c.layout.ep} does not divide {n}"
    )
    given = asked(c, "ep", *moved(c, "etp"), "tp", *moved(c, "cp"), "dp")
    if c.layout.dp == 1:  # experts are dealt among data-parallel ranks, and none were asked for
        parts = c.layout.expert_tp * c.layout.ep
        return Problem(given, case, f"--dp {parts // gcd(parts, n)}")
    return Problem(given, case, f"--ep {nearest_divisor(n // etp, c.layout.ep)} --etp {etp}")


def _deal(c: RunConfig, f: Facts) -> Problem:
    e = value(c, "num_experts")
    case = f"every rank holds as many experts, and {e} / {c.layout.ep} = {e / c.layout.ep:g}"
    fits = gcd(e, max(1, _stage_ranks(c) // c.layout.expert_tp))
    return Problem(asked(c, "ep", "num_experts"), case, f"--ep {nearest_divisor(fits, c.layout.ep)}")


def _coefficient_idle(c: RunConfig, m: MoEConfig) -> bool:
    return m.moe_router_load_balancing_type in ("none", "sinkhorn") and m.moe_aux_loss_coeff != 0


def _nothing_travels(c: RunConfig, f: Facts) -> bool:
    layout = c.layout
    together = layout.ep == 1 and layout.expert_tp in (1, layout.tp)
    stay = _moe(c) is None or layout.moe_token_dispatcher_type == "allgather" or together
    return layout.overlap_moe_expert_parallel_comm and stay


_TRAVEL = "overlap_moe_expert_parallel_comm moe_token_dispatcher_type ep etp"
_SINKHORN = "moe_router_load_balancing_type moe_router_enable_expert_bias moe_router_num_groups"
_CAPACITY = "moe_pad_expert_input_to_capacity moe_expert_capacity_factor"

PATTERN_RULE = Rule("blocks with experts", ("moe_layer_freq", "num_layers"), _of(_pattern_broken), _pattern)
EXPERT_RULES: tuple[Rule, ...] = (
    Rule("topk experts exist", ("moe_router_topk", "num_experts"),
         _of(lambda c, m: m.moe_router_topk > m.num_experts), _topk),
    Rule("groups of experts", ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores",
                               "num_experts", "moe_router_topk"), _of(_groups_broken), _groups),
    Rule("experts to be dealt", ("ep", "etp"),
         lambda c, f: _moe(c) is None and (c.layout.ep > 1 or c.layout.etp > 0),
         _problem("ep etp", "--ep 1 --etp 0", lambda c: "this model has no experts")),
    Rule("ep divides experts", ("ep", "num_experts"), _of(lambda c, m: m.num_experts % c.layout.ep != 0), _deal),
    Rule("experts fold the ranks", ("ep", "etp", "tp", "cp", "dp"),
         _of(lambda c, m: _stage_ranks(c) % (c.layout.expert_tp * c.layout.ep) != 0), _fold),
    Rule("tp divides experts",
         ("tp", "etp", "moe_ffn_hidden_size", "ffn_hidden_size", "moe_shared_expert_intermediate_size"),
         _of(lambda c, m: m.expert_width % c.layout.expert_tp != 0 or m.shared_width % c.layout.tp != 0), _width),
    Rule("halves that travel", (*_TRAVEL.split(), "tp"), _nothing_travels,
         _problem(_TRAVEL, "--ep 2 --moe-token-dispatcher-type alltoall, or --no-overlap-moe-expert-parallel-comm",
                  lambda c: "no token is sent to experts of other ranks, so no half could be under way")),
    Rule("padding needs a capacity", tuple(_CAPACITY.split()),
         _of(lambda c, m: m.moe_pad_expert_input_to_capacity and not m.moe_expert_capacity_factor),
         _problem(_CAPACITY, "--moe-expert-capacity-factor 1.25", lambda c: "without a capacity there is no size")),
    Rule("a gate needs a shared expert", ("moe_shared_expert_gate", "moe_shared_expert_intermediate_size"),
         _of(lambda c, m: m.moe_shared_expert_gate and not m.shared_width),
         _problem("moe_shared_expert_gate moe_shared_expert_intermediate_size",
                  "--moe-shared-expert-intermediate-size 128", lambda c: "there is no shared expert to gate")),
    Rule("a balance loss has a kind", ("moe_aux_loss_coeff", "moe_router_load_balancing_type"), _of(_coefficient_idle),
         _problem("moe_aux_loss_coeff moe_router_load_balancing_type", "--moe-aux-loss-coeff 0.0",
                  lambda c: "this kind of balancing has no loss, so the factor would do nothing")),
    Rule("sinkhorn alone", tuple(_SINKHORN.split()),
         _of(lambda c, m: m.moe_router_load_balancing_type == "sinkhorn"
             and (m.moe_router_enable_expert_bias or m.moe_router_num_groups > 0)),
         _problem(_SINKHORN, "--moe-router-load-balancing-type none",
                  lambda c: "sinkhorn decides alone which experts are chosen; a bias or groups would do nothing")),
    Rule("predictions untie", ("mtp_num_layers", "tie_embeddings"),
         lambda c, f: getattr(c.model, "mtp_num_layers", 0) > 0 and c.model.tie_embeddings,
         _problem("mtp_num_layers tie_embeddings", "--no-tie-embeddings",
                  lambda c: "one tie of the embedding is known at a time, and predictions of further tokens have it")),
    Rule("whole sequences for experts", ("cp", "moe_expert_capacity_factor", "moe_router_load_balancing_type",
                                         "moe_input_jitter_eps"),
         _of(lambda c, m: c.layout.cp > 1 and bool(m.moe_expert_capacity_factor or m.moe_input_jitter_eps
                                                   or m.moe_router_load_balancing_type == "sinkhorn")),
         _problem("cp", "--cp 1", lambda c: "capacities, sinkhorn and jitter need whole sequences on a rank")),
)  # fmt: skip
