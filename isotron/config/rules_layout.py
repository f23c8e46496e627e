"""Rules on how a model is cut: heads, widths, sequences, layers over ranks; ranks over processes and devices. PURE."""

from __future__ import annotations

from isotron.config.rules import Facts, Rule, asked, flag, moved, nearest_divisor
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem, Refused
from isotron.core.parallel.pipeline import registry
from isotron.core.parallel.plan import split_layers
from isotron.core.parallel.split import counts_of, model_costs


def _heads_divide(c: RunConfig, f: Facts) -> Problem:
    d, h = c.model.hidden_size, c.model.num_attention_heads
    case = f"hidden_size {d} / {h} heads = {d / h:g}, and a head has a whole number of elements"
    even = 2 if hasattr(c.model, "rope_theta") else 1  # rotary positions turn pairs
    groups = getattr(c.model, "num_key_value_heads", 0) or 1
    unit = h * even
    sizes = [n for n in (d // unit * unit, d // unit * unit + unit) if n]
    fits = [n for n in range(groups, d + 1, groups) if d % (n * even) == 0]
    heads = [*fits[: sum(n < h for n in fits)][-1:], *[n for n in fits if n > h][:1]]
    ways = [f"--hidden-size {_either(sizes)}", *([f"--num-attention-heads {_either(heads)}"] if heads else [])]
    return Problem(asked(c, "hidden_size", "num_attention_heads"), case, ", or ".join(ways))


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _rotary_even(c: RunConfig, f: Facts) -> Problem:
    n = c.model.head_size
    if c.model.family == "neox":
        case = f"rotary positions turn pairs of elements, and rope_percent of a head of {n} is {_rotated(c)}"
        return Problem(asked(c, "rope_percent"), case, "--rope-percent 1.0")
    case = f"rotary positions turn pairs of elements, and {_rotated(c)} of a head of {n} are to be turned"
    fix = f"--head-dim {n + n % 2} --rope-percent 1.0"
    extra = moved(c, "head_dim", "rope_percent")
    return Problem(asked(c, "hidden_size", "num_attention_heads", *extra), case, fix)


def _rotated(c: RunConfig) -> int:
    """Elements of a head that are rotated; 2 for a family that does not rotate."""
    return int(c.model.head_size * c.model.rope_percent) if hasattr(c.model, "rope_percent") else 2


def _longrope_broken(c: RunConfig, f: Facts) -> bool:
    if getattr(c.model, "rope_scaling", "none") != "longrope":
        return False
    wanted = _rotated(c) // 2
    return any(len(x) != wanted for x in (c.model.rope_short_factor, c.model.rope_long_factor))  # type: ignore[union-attr]


def _longrope(c: RunConfig, f: Facts) -> Problem:
    wanted = _rotated(c) // 2
    case = f"longrope divides each of the {wanted} frequencies of a head by a number of its own"
    leaves = ("rope_scaling", "rope_short_factor", "rope_long_factor")
    ones = ",".join(["1.0"] * wanted)
    return Problem(asked(c, *leaves), case, f"--rope-short-factor {ones} --rope-long-factor {ones}")


def _dynamic(c: RunConfig, f: Facts) -> Problem:
    case = f"dynamic stretches every pair but the first, and {_rotated(c)} elements of a head are one pair"
    return Problem(asked(c, "rope_scaling", "head_dim", "rope_percent"), case, "--head-dim 4 --rope-percent 1.0")


def _groups(c: RunConfig, f: Facts) -> Problem:
    h, k = c.model.num_attention_heads, c.model.kv_heads
    case = f"each key/value head serves the same number of query heads, and {h} / {k} = {h / k:g}"
    fix = f"--num-key-value-heads {nearest_divisor(h, k)}"
    return Problem(asked(c, "num_attention_heads", "num_key_value_heads"), case, fix)


def legal_tp(c: RunConfig) -> int:
    """The largest tensor-parallel size up to the one asked for that divides heads, groups and the MLP."""
    h, k = c.model.num_attention_heads, c.model.kv_heads
    sizes = range(1, c.layout.tp + 1)
    return max(t for t in sizes if h % t == 0 and c.model.ffn % t == 0 and (k % t == 0 or t % k == 0))


def _tp_heads(c: RunConfig, f: Facts) -> Problem:
    h, tp = c.model.num_attention_heads, c.layout.tp
    case = f"whole heads are dealt to tensor-parallel ranks, and {h} heads / {tp} ranks = {h / tp:g}"
    return Problem(asked(c, "tp", "num_attention_heads"), case, f"--tp {legal_tp(c)}")


def _tp_groups(c: RunConfig, f: Facts) -> Problem:
    k, tp = c.model.kv_heads, c.layout.tp
    case = (
        f"key/value heads ({k}) and tensor-parallel ranks ({tp}) must divide one another, and neither divides the other"
    )
    return Problem(asked(c, "tp", "num_key_value_heads"), case, f"--tp {legal_tp(c)}")


def _tp_ffn(c: RunConfig, f: Facts) -> Problem:
    w, tp = c.model.ffn, c.layout.tp
    case = f"the MLP is split over tensor-parallel ranks, and ffn_hidden_size {w} / {tp} ranks = {w / tp:g}"
    return Problem(
        f"{asked(c, 'tp')} --ffn-hidden-size {w}", case, f"--tp {legal_tp(c)}, or --ffn-hidden-size {-(-w // tp) * tp}"
    )


def _sequence(c: RunConfig, f: Facts) -> Problem:
    s, tp, cp = c.data.seq_length, c.layout.tp, c.layout.cp
    unit = tp * cp * (2 if cp > 1 else 1)
    near = max(s // unit, 1) * unit
    ways = f"{tp} ranks" if cp == 1 else f"tp {tp} x cp {cp} ranks"
    case = f"sequence parallelism splits the sequence over {ways}, and {s} / {tp * cp} = {s / tp / cp:g} tokens"
    given = asked(c, "sequence_parallel", "tp", *moved(c, "cp"), "seq_length")
    return Problem(given, case, f"--seq-length {near}, or --no-sequence-parallel")


def even_split(layers: int, stages: int) -> str:
    """A legal --layers-per-stage: every count as near to even as it can be."""
    each, extra = divmod(layers, stages)
    return ",".join(str(each + (i < extra)) for i in range(stages))


def _stage_list_broken(c: RunConfig, f: Facts) -> bool:
    counts = c.layout.layers_per_stage
    return bool(counts) and (
        len(counts) != c.layout.stages or sum(counts) != c.model.num_layers or any(n < 0 or 2 * n % 1 for n in counts)
    )


def _stage_list(c: RunConfig, f: Facts) -> Problem:
    counts, stages, layers = c.layout.layers_per_stage, c.layout.stages, c.model.num_layers
    given = f"given are {len(counts)} that sum to {sum(counts):g}"
    kind = ", in whole and half blocks," if any(n % 1 for n in counts) else ""
    case = f"{stages} stages{_product(c)} need {stages} counts of 0 or more{kind} that sum to {layers}; {given}"
    whole = sum(counts) == layers and len(counts) > 1 and stages == 1  # the number of stages is what is missing
    fix = f"--pp {len(counts)}" if whole else f"--layers-per-stage {even_split(layers, stages)}"
    return Problem(asked(c, "layers_per_stage", "num_layers", "pp", *moved(c, "vpp")), case, fix)


def _cut_uncuttable(c: RunConfig) -> bool:
    return any(n % 1 for n in c.layout.layers_per_stage) and not model_costs(c.model).attention


def _uncuttable(c: RunConfig, f: Facts) -> Problem:
    beside = "attention and MLP read the same residual stream"
    why = beside if getattr(c.model, "parallel_residual", False) else "they are of two kinds, each with rows of its own"
    case = f"blocks of this model cannot be cut in two: {why}"
    fix = f"--layers-per-stage {even_split(c.model.num_layers, max(1, c.layout.stages))}"
    return Problem(asked(c, "layers_per_stage", *moved(c, "parallel_residual")), case, fix)


def _stage_list_and_ends(c: RunConfig, f: Facts) -> Problem:
    case = "layers_per_stage already names the layers of the first and the last stage"
    fix = "--first-stage-layers 0 --last-stage-layers 0"
    ends = moved(c, "first_stage_layers", "last_stage_layers")
    return Problem(asked(c, "layers_per_stage", *ends), case, fix)


def _counts(c: RunConfig) -> list[float]:
    """Layers of each stage; empty when they cannot be dealt as asked."""
    try:
        return counts_of(split_layers(c.model.num_layers, c.layout, model_costs(c.model)))
    except Refused:
        return []


def _numbered(c: RunConfig) -> bool:
    """Whether every stage's blocks are given."""
    return bool(c.layout.layers_per_stage or c.layout.pipeline_layout)


def _ends(c: RunConfig, f: Facts) -> Problem:
    stages, layers = c.layout.stages, c.model.num_layers
    case = f"the {stages} stages must hold {layers} layers together, and these ends leave no such split"
    fix = "--first-stage-layers 0 --last-stage-layers 0"
    ends = moved(c, "first_stage_layers", "last_stage_layers")
    return Problem(asked(c, *ends, "num_layers", "pp", *moved(c, "vpp")), case, fix)


def _empty_stage(c: RunConfig, f: Facts) -> Problem:
    layers, stages = c.model.num_layers, c.layout.stages
    pp = max(1, min(layers // registry.stages_per_rank(c.layout.schedule, c.layout.pp, 1), c.layout.pp))
    case = f"{layers} layers over {stages} stages{_product(c)} as {_counts(c)} leave a stage without a layer"
    given = moved(c, "vpp", "first_stage_layers", "last_stage_layers")
    back = "".join(f" {flag(leaf)} {int(leaf == 'vpp')}" for leaf in given)
    fix = f"--pp {pp}{back}, or ask for empty stages by --layers-per-stage"
    return Problem(asked(c, "num_layers", "pp", *given), case, fix)


def _product(c: RunConfig) -> str:
    """Where the number of stages comes from, where that is not pp alone."""
    return "" if c.layout.chunks == 1 else f" ({c.layout.chunks} on each of pp {c.layout.pp} ranks)"


def _recompute_units(c: RunConfig, f: Facts) -> Problem:
    case = "it counts the blocks of a unit of full recompute, which is not asked for"
    return Problem(asked(c, "recompute_num_layers", "recompute"), case, "--recompute full, or --recompute-num-layers 1")


def _recompute_method(c: RunConfig, f: Facts) -> Problem:
    case = "it says which blocks full recompute takes, which is not asked for"
    return Problem(asked(c, "recompute_method", "recompute"), case, "--recompute full, or --recompute-method uniform")


def _shares(c: RunConfig, f: Facts) -> Problem:
    case = "it cuts the input of a unit of full recompute over tensor-parallel ranks that hold all of it"
    given = asked(c, "distribute_saved_activations", "recompute", "tp", "sequence_parallel")
    return Problem(given, case, "--no-distribute-saved-activations")


MODULES = ("core_attn", "layernorm", "moe_act", "mlp")


def _modules_broken(c: RunConfig, f: Facts) -> bool:
    given = c.layout.recompute_modules
    moved_here = given != ("core_attn", "layernorm", "moe_act")
    return any(m not in MODULES for m in given) or (moved_here and c.layout.recompute != "selective")


def _modules(c: RunConfig, f: Facts) -> Problem:
    case = f"selective recompute takes modules out of {', '.join(MODULES)}, and it alone does"
    fix = "--recompute selective --recompute-modules core_attn layernorm"
    return Problem(asked(c, "recompute_modules", "recompute"), case, fix)


def _budget(c: RunConfig, f: Facts) -> Problem:
    case = "what is recomputed is chosen for the budget, or named"
    return Problem(asked(c, "activation_budget_gib", "recompute"), case, "--recompute none, or without a budget")


def _offloaded(c: RunConfig, f: Facts) -> Problem:
    case = "it counts blocks whose activations are kept in host memory, which is not asked for"
    given = asked(c, "cpu_offloading_num_layers", "cpu_offloading")
    return Problem(given, case, "--cpu-offloading, or --cpu-offloading-num-layers 0")


def _kept_twice(c: RunConfig, f: Facts) -> Problem:
    case = "the input of a recomputed unit is kept in shares or in host memory, not both"
    given = asked(c, "distribute_saved_activations", "cpu_offloading")
    return Problem(given, case, "--no-distribute-saved-activations")


def _chunks_of_experts(c: RunConfig, f: Facts) -> Problem:
    case = "experts see all tokens of a microbatch at once"
    return Problem(
        asked(c, "mlp_chunks", "num_experts"), case, "--mlp-chunks 1 --recompute-modules mlp --recompute selective"
    )


def _world_broken(c: RunConfig, f: Facts) -> bool:
    return f.world_size is not None and c.layout.world != f.world_size


def _world(c: RunConfig, f: Facts) -> Problem:
    tp, pp, cp, world = c.layout.tp, c.layout.pp, c.layout.cp, f.world_size or 1
    case = f"{_axes(c)} = {c.layout.world} ranks, and the launcher started {world} processes"
    fits = world % (tp * pp * cp) == 0
    alone = f"--tp 1 --pp 1{' --cp 1' if cp > 1 else ''} --dp {world}"
    fix = f"--dp {world // (tp * pp * cp)}" if fits else f"{alone}, or start {c.layout.world} processes"
    return Problem(asked(c, "tp", "pp", *moved(c, "cp"), "dp"), case, fix)


def _axes(c: RunConfig) -> str:
    """The product of ranks, without a context-parallel axis that is not in use."""
    cp = f" x cp {c.layout.cp}" if c.layout.cp > 1 else ""
    return f"tp {c.layout.tp} x pp {c.layout.pp}{cp} x dp {c.layout.dp}"


def _devices_broken(c: RunConfig, f: Facts) -> bool:
    return c.train.device != "cpu" and 0 < f.device_count < c.layout.world and f.world_size is None


def _devices(c: RunConfig, f: Facts) -> Problem:
    world = c.layout.world
    case = f"{_axes(c)} = {world} ranks need as many devices, and this machine has {f.device_count}"
    return Problem(
        asked(c, "tp", "pp", *moved(c, "cp"), "dp", "device"),
        case,
        f"--device cpu, or torchrun over machines with {world} devices",
    )


def _no_device(c: RunConfig, f: Facts) -> Problem:
    return Problem(asked(c, "device"), "no such device is visible to torch", "--device cpu")


_DEAL = ("num_layers", "pp", "vpp", "layers_per_stage", "first_stage_layers", "last_stage_layers", "pipeline_layout")

LAYOUT_RULES: tuple[Rule, ...] = (
    Rule("heads divide the width", ("hidden_size", "num_attention_heads", "head_dim"),
         lambda c, f: not getattr(c.model, "head_dim", 0) and c.model.hidden_size % c.model.num_attention_heads != 0,
         _heads_divide),
    Rule("rotary heads are even", ("hidden_size", "num_attention_heads", "head_dim", "rope_percent"),
         lambda c, f: c.model.head_size > 0 and (_rotated(c) % 2 != 0 or _rotated(c) < 2), _rotary_even),
    Rule("longrope factors", ("hidden_size", "num_attention_heads", "head_dim", "rope_percent", "rope_scaling",
                              "rope_short_factor", "rope_long_factor"), _longrope_broken, _longrope),
    Rule("dynamic stretch has pairs", ("hidden_size", "num_attention_heads", "head_dim", "rope_percent",
                                       "rope_scaling"),
         lambda c, f: getattr(c.model, "rope_scaling", "none") == "dynamic" and _rotated(c) < 4, _dynamic),
    Rule("groups divide heads", ("num_attention_heads", "num_key_value_heads"),
         lambda c, f: c.model.num_attention_heads % c.model.kv_heads != 0, _groups),
    Rule("tp divides heads", ("tp", "num_attention_heads"),
         lambda c, f: c.model.num_attention_heads % c.layout.tp != 0, _tp_heads),
    Rule("tp and groups divide", ("tp", "num_attention_heads", "num_key_value_heads"),
         lambda c, f: c.model.kv_heads % c.layout.tp != 0 and c.layout.tp % c.model.kv_heads != 0
         and c.model.num_attention_heads % c.layout.tp == 0, _tp_groups),
    Rule("tp divides the MLP", ("tp", "hidden_size", "ffn_hidden_size"),
         lambda c, f: c.model.ffn % c.layout.tp != 0, _tp_ffn),
    Rule("tp divides the sequence", ("tp", "cp", "seq_length", "sequence_parallel"),
         lambda c, f: c.layout.sequence_parallel and c.data.seq_length % (c.layout.tp * c.layout.cp) != 0, _sequence),
    Rule("layers per stage", _DEAL, _stage_list_broken, _stage_list),
    Rule("blocks that are cut", (*_DEAL, "parallel_residual"), lambda c, f: _cut_uncuttable(c), _uncuttable),
    Rule("one way to deal layers", _DEAL,
         lambda c, f: bool(c.layout.layers_per_stage) and c.layout.first_stage_layers + c.layout.last_stage_layers > 0,
         _stage_list_and_ends),
    Rule("first and last stage", _DEAL, lambda c, f: not _numbered(c) and not _counts(c), _ends),
    Rule("no empty stage", _DEAL, lambda c, f: not _numbered(c) and 0 in _counts(c), _empty_stage),
    Rule("blocks of full recompute", ("recompute", "recompute_method"),
         lambda c, f: c.layout.recompute_method == "block" and c.layout.recompute != "full", _recompute_method),
    Rule("shares of a unit's input", ("recompute", "distribute_saved_activations", "sequence_parallel", "tp"),
         lambda c, f: c.layout.distribute_saved_activations
         and (c.layout.recompute != "full" or c.layout.tp == 1 or c.layout.sequence_parallel), _shares),
    Rule("budget of activations", ("activation_budget_gib", "recompute"),
         lambda c, f: c.layout.activation_budget_gib > 0 and c.layout.recompute != "none", _budget),
    Rule("offloaded blocks", ("cpu_offloading", "cpu_offloading_num_layers"),
         lambda c, f: c.layout.cpu_offloading_num_layers > 0 and not c.layout.cpu_offloading, _offloaded),
    Rule("shares or host memory", ("cpu_offloading", "distribute_saved_activations"),
         lambda c, f: c.layout.cpu_offloading and c.layout.distribute_saved_activations, _kept_twice),
    Rule("chunks of an MLP", ("mlp_chunks", "num_experts"),
         lambda c, f: c.layout.mlp_chunks > 1 and getattr(c.model, "num_experts", 0) > 0, _chunks_of_experts),
    Rule("modules of selective recompute", ("recompute", "recompute_modules"), _modules_broken, _modules),
    Rule("units of full recompute", ("recompute", "recompute_num_layers"),
         lambda c, f: c.layout.recompute_num_layers > 1 and c.layout.recompute != "full", _recompute_units),
    Rule("world size", ("tp", "pp", "cp", "dp"), _world_broken, _world),
    Rule("enough devices", ("tp", "pp", "cp", "dp", "device"), _devices_broken, _devices),
    Rule("a device", ("device",),
         lambda c, f: c.train.device not in ("auto", "cpu") and f.device_count == 0, _no_device),
)  # fmt: skip
