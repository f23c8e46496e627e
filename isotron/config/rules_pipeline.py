"""Rules on pipeline schedules: stages per rank, tables in files, searches, groups, layout strings. PURE."""

from __future__ import annotations

from isotron.config.rules import Facts, Rule, asked
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem, Refused
from isotron.core.parallel.costs import costed
from isotron.core.parallel.pipeline import library, registry, tables
from isotron.core.parallel.pipeline.live import chooses_sums
from isotron.core.parallel.pipeline.simulate import simulate
from isotron.core.parallel.split import layout_counts


def _vpp_alone(c: RunConfig, f: Facts) -> Problem:
    case = "several stages per rank shorten the wait between pipeline ranks, and there is one rank"
    return Problem(asked(c, "vpp", "pp"), case, "--vpp 1, or --pp 2 or more")


def _per_rank(c: RunConfig) -> str:
    """Stages per rank of the schedule: one, two, several; empty for auto and for tables in files."""
    entry = registry.SCHEDULES.get(c.layout.schedule)
    return entry.per_rank if entry else ""


def _vpp_schedule(c: RunConfig, f: Facts) -> Problem:
    case = f"schedule {c.layout.schedule} has one stage per rank, and there are {c.layout.chunks}"
    return Problem(asked(c, "schedule", "vpp", "pipeline_layout"), case, "--schedule interleaved, or --vpp 1")


def _interleaved_alone(c: RunConfig, f: Facts) -> Problem:
    case = f"the {c.layout.schedule} schedule alternates between several stages of a rank, and there is one"
    return Problem(asked(c, "schedule", "vpp"), case, "--schedule auto, or --pp 2 --vpp 2")


def _two_per_rank(c: RunConfig, f: Facts) -> Problem:
    case = f"the stages of {c.layout.schedule} go down the ranks and up again, two per rank, not {c.layout.chunks}"
    return Problem(asked(c, "schedule", "vpp", "pp"), case, "--vpp 2")


def _no_schedule(c: RunConfig, f: Facts) -> Problem:
    return registry.unknown(c.layout.schedule).problems[0]


def _microbatches(c: RunConfig) -> int:
    """Microbatches of every step."""
    return c.train.global_batch_size // max(1, c.train.micro_batch_size * max(c.layout.dp, 1))


def _file_problem(c: RunConfig) -> Problem | None:
    """What is wrong with a table in a file; its number of microbatches must be that of every step."""
    layout = c.layout
    if not tables.is_file(layout.schedule):
        return None
    try:
        simulate(library.complete(tables.fitting(layout.schedule, layout.pp, _microbatches(c), layout.vpp)))
    except Refused as refused:
        return refused.problems[0]
    return None


def _table_file(c: RunConfig, f: Facts) -> Problem:
    return _file_problem(c) or Problem(asked(c, "schedule"), "it does not fit", "--schedule auto")


def _sums_twice_said(c: RunConfig) -> bool:
    """Whether a table says when gradients are summed, and a budget too."""
    if not c.layout.max_live_gradients or not tables.is_file(c.layout.schedule):
        return False
    try:
        return chooses_sums(tables.read(c.layout.schedule))
    except Refused:
        return False  # of the table, which has its own rule


def _sums_twice(c: RunConfig, f: Facts) -> Problem:
    case = "the table reduces a stage more than once: it says itself which gradients wait"
    return Problem(asked(c, "schedule", "max_live_gradients"), case, "--max-live-gradients 0")


def _search(c: RunConfig, f: Facts) -> Problem:
    case = "the search has a schedule to find only where schedule is auto and there are pipeline ranks"
    fix = "--schedule-memory 0, or --schedule auto --pp 2"
    return Problem(asked(c, "schedule_memory", "schedule", "pp"), case, fix)


def _search_problem(c: RunConfig) -> Problem | None:
    """Whether the search finds a schedule within the memory, for the microbatches that every step has."""
    layout = c.layout
    if layout.schedule_memory <= 0 or layout.schedule != "auto" or layout.pp == 1 or _search_costs_broken(c, Facts()):
        return None
    try:
        layout = costed(c.model, layout)
    except Refused:
        return None  # of the split, which has its own rule
    try:
        layout.table(max(1, _microbatches(c)))
    except Refused as refused:
        return refused.problems[0]
    return None


def _search_fails(c: RunConfig, f: Facts) -> Problem:
    return _search_problem(c) or Problem(asked(c, "schedule_memory"), "no schedule fits", "--schedule-memory 0")


def _search_costs_broken(c: RunConfig, f: Facts) -> bool:
    try:
        library.costs_of(c.layout.schedule_costs, c.layout.pp, c.layout.chunks)
    except Refused:
        return True
    return bool(c.layout.schedule_costs) and not c.layout.schedule_memory


def _search_costs(c: RunConfig, f: Facts) -> Problem:
    case = "they are forward, input gradient, weight gradient and transfer of a rank, for the search of schedule_memory"
    return Problem(asked(c, "schedule_costs"), case, f"--schedule-costs 10,12,9,1 --schedule-memory {c.layout.pp}")


def _group(c: RunConfig, f: Facts) -> Problem:
    case = "groups of microbatches belong to the interleaved schedule"
    return Problem(asked(c, "microbatch_group", "schedule"), case, "--microbatch-group 0")


def _layout_problem(c: RunConfig) -> Problem | None:
    """What is wrong with a layout string."""
    text, pp, vpp = c.layout.pipeline_layout, c.layout.pp, c.layout.vpp
    if not text:
        return None
    try:
        stages, found = len(layout_counts(text)), sum(layout_counts(text))
    except Refused as refused:
        return refused.problems[0]
    if stages % pp or (vpp > 1 and stages != pp * vpp):
        case = f"it has {stages} stages, which are dealt to {pp} ranks" + (f", {vpp} each" if vpp > 1 else "")
        fix = "--vpp 1, or leave --pipeline-layout out" if vpp > 1 else "leave --pipeline-layout out"
        return Problem(asked(c, "pipeline_layout", "pp", "vpp"), case, fix)
    if found != c.model.num_layers:
        case = f"it has {found} blocks (t), the model has {c.model.num_layers}"
        return Problem(asked(c, "pipeline_layout", "num_layers"), case, f"--num-layers {found}, or another string")
    if c.layout.layers_per_stage or c.layout.first_stage_layers or c.layout.last_stage_layers:
        leaves = ("pipeline_layout", "layers_per_stage", "first_stage_layers", "last_stage_layers")
        return Problem(asked(c, *leaves), "the string already says how blocks are dealt", "leave the others out")
    return None


def _layout_string(c: RunConfig, f: Facts) -> Problem:
    return _layout_problem(c) or Problem(asked(c, "pipeline_layout"), "it does not fit", "leave it out")


def _keep(c: RunConfig, f: Facts) -> Problem:
    case = "it counts microbatches that are not recomputed under full recompute, which is not asked for"
    return Problem(asked(c, "recompute_keep", "recompute"), case, "--recompute full, or --recompute-keep 0")


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule("layout string", (
        "num_layers", "pp", "vpp", "layers_per_stage", "first_stage_layers", "last_stage_layers", "pipeline_layout",
    ), lambda c, f: _layout_problem(c) is not None, _layout_string),
    Rule("vpp needs pp", ("vpp", "pp"), lambda c, f: c.layout.vpp > 1 and c.layout.pp == 1, _vpp_alone),
    Rule("a schedule", ("schedule",),
         lambda c, f: c.layout.schedule not in registry.NAMES and not tables.is_file(c.layout.schedule), _no_schedule),
    Rule("vpp needs interleaved", ("vpp", "schedule", "pipeline_layout"),
         lambda c, f: c.layout.chunks > 1 and _per_rank(c) == "one", _vpp_schedule),
    Rule("interleaved needs vpp", ("vpp", "schedule", "pipeline_layout"),
         lambda c, f: c.layout.chunks == 1 and _per_rank(c) == "several", _interleaved_alone),
    Rule("a V has two stages", ("vpp", "schedule", "pipeline_layout", "pp"),
         lambda c, f: c.layout.pp > 1 and c.layout.chunks != 2 and _per_rank(c) == "two", _two_per_rank),
    Rule("a table that fits", ("schedule", "pp", "vpp", "global_batch_size", "micro_batch_size", "dp"),
         lambda c, f: _file_problem(c) is not None, _table_file),
    Rule("one word on sums", ("schedule", "max_live_gradients"), lambda c, f: _sums_twice_said(c), _sums_twice),
    Rule("a schedule to search", ("schedule", "schedule_memory", "pp"),
         lambda c, f: c.layout.schedule_memory > 0 and (c.layout.schedule != "auto" or c.layout.pp == 1), _search),
    Rule("a search that finds", ("schedule", "schedule_memory", "schedule_costs", "pp", "vpp", "dp",
                                 "global_batch_size", "micro_batch_size"),
         lambda c, f: _search_problem(c) is not None, _search_fails),
    Rule("costs of the search", ("schedule_costs", "schedule_memory"), _search_costs_broken, _search_costs),
    Rule("groups of microbatches", ("microbatch_group", "schedule", "vpp"),
         lambda c, f: c.layout.microbatch_group > 0 and c.layout.schedule_name != "interleaved", _group),
    Rule("kept of full recompute", ("recompute", "recompute_keep"),
         lambda c, f: c.layout.recompute_keep > 0 and c.layout.recompute != "full", _keep),
)  # fmt: skip
