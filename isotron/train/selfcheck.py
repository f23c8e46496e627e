"""`isotron verify`: the user's config scaled down, in the user's layout, against one process in float64.

What is kept: the family and its switches, the ratio of query to key/value heads, whether heads are decoupled from the
hidden size, ties, dropout, the schedule, sequence parallelism, ZeRO, recompute, uneven splits and empty stages, the
optimizer with its groups and what is frozen. What shrinks: every axis to at most 2 (TP to 4 where key/value heads are
shared between ranks), widths, layers to about 2 per stage, microbatches to at most 3, the vocabulary to an odd 131.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from isotron.config.schema import RunConfig
from isotron.core.parallel.pipeline.tables import is_file
from isotron.core.parallel.plan import Layout
from isotron.launch import run_ranks
from isotron.train.scaled_experts import scaled_experts
from isotron.train.scaled_run import changed_rules, scaled_optim, scaled_split
from isotron.train.verify import TOLERANCE, Case, Measured, Row, compare, measure

SEQUENCE = 16
MICROBATCHES = 3  # of a step, at most
TIMEOUT_S = 300.0


def scaled_layout(config: RunConfig) -> Layout:
    """The layout with every axis at most 2, or TP 4 where it exceeds the key/value heads."""
    own = config.layout
    stages = min(own.pp, 2) * min(own.chunks, 2)
    tp = 4 if own.tp > config.model.kv_heads else min(own.tp, 2)
    cp = min(own.cp, 4 if "a2a+p2p" in own.cp_comm_type else 2)
    ep, etp = min(own.ep, 2), tp if own.expert_tp == own.tp else min(own.etp, 2)
    return replace(
        own,
        tp=tp,
        pp=min(own.pp, 2),
        dp=max(min(max(own.dp, 1), 2), -(-ep * etp // (tp * cp))),  # enough ranks for both views
        cp=cp,
        ep=ep,
        etp=etp if own.etp else 0,
        cp_comm_type=_types(own.cp_comm_type),
        hierarchical_cp_sizes=(2, cp // 2) if "a2a+p2p" in own.cp_comm_type and cp > 1 else (),
        max_seqlen_per_dp_cp_rank=SEQUENCE // (cp * min(max(own.dp, 1), 2)) if own.hybrid_context_parallel else 0,
        vpp=min(own.chunks, 2),
        schedule="auto" if is_file(own.schedule) else own.schedule,  # a table in a file has one size
        microbatch_group=0,
        schedule_costs=own.schedule_costs if len(own.schedule_costs) <= 4 else (),  # of every stage: of one size too
        pipeline_layout="",
        layers_per_stage=scaled_split(config, stages),
        first_stage_layers=min(own.first_stage_layers, 1),
        last_stage_layers=min(own.last_stage_layers, 1),
        recompute_num_layers=min(own.recompute_num_layers, 2),
        ddp_bucket_size=10_000,
    )


def _types(own: tuple[str, ...]) -> tuple[str, ...]:
    """One type, or as many different ones as there are, in the order of the layers."""
    return tuple(dict.fromkeys(own))


def scaled_model(config: RunConfig, layout: Layout) -> Any:
    """A small model of the same family with the same switches."""
    model = config.model
    shared = config.layout.tp > model.kv_heads
    kv = 2 if shared else max(layout.tp, 1 if model.kv_heads == 1 else 2)
    heads = kv * (model.num_attention_heads // model.kv_heads)
    heads += -heads % (layout.tp * layout.cp)  # the heads of a rank are dealt to context-parallel ranks
    decoupled = model.head_size * model.num_attention_heads != model.hidden_size
    uneven = bool(model.num_layers % layout.stages)
    blocks = int(sum(layout.layers_per_stage)) or 2 * layout.stages + uneven
    sizes: dict[str, Any] = {
        "num_layers": blocks,
        "encoder_num_layers": blocks // 2,
        "decoder_num_layers": blocks - blocks // 2,
        "decoder_seq_length": SEQUENCE,
        "relative_attention_max_distance": SEQUENCE,
        "num_attention_heads": heads,
        "hidden_size": heads * 8 + (16 if decoupled else 0),
        "ffn_hidden_size": 24 * layout.tp,
        "vocab_size": 131,
        "max_position_embeddings": SEQUENCE,
        "num_key_value_heads": kv,
        "head_dim": 8 if decoupled else 0,
        "sliding_window": SEQUENCE // 3 if getattr(model, "sliding_window", 0) else 0,
        "window_attn_skip_freq": min(getattr(model, "window_attn_skip_freq", 0), 2),
        "first_window_layer": int(getattr(model, "first_window_layer", 0) > 0),
    }
    sizes |= scaled_experts(model, blocks, layout.tp, layout.ep)
    fields = type(model).__dataclass_fields__
    small = replace(model, **{k: v for k, v in sizes.items() if k in fields})
    return with_rotation(small) if hasattr(small, "rope_percent") else small


def with_rotation(small: Any) -> Any:
    """The same kind of stretch on heads of 8 and 16 positions, so that it acts inside the tested sequence."""
    rotated = max(4, int(8 * small.rope_percent) // 2 * 2)
    factors = {
        leaf: tuple(1.0 + i * step for i in range(rotated // 2)) if getattr(small, leaf) else ()
        for leaf, step in (("rope_short_factor", 0.25), ("rope_long_factor", 1.5))
    }
    return replace(small, rope_percent=rotated / 8, rope_original_positions=SEQUENCE // 2, **factors)


def scaled_case(config: RunConfig, inject: str = "") -> Case:
    """What is trained in place of the user's run: a few microbatches, unequal numbers of unmasked tokens."""
    layout, data = scaled_layout(config), config.data
    micro, model = min(config.train.micro_batch_size, 2), scaled_model(config, layout)
    optim = scaled_optim(config, model)
    return Case(
        model,
        layout,
        SEQUENCE,
        micro,
        min(microbatches(config) or MICROBATCHES, MICROBATCHES) * micro * layout.dp,
        isolate=data.reset_attention_mask or data.pack_documents or data.short_seq_prob > 0,
        inject=inject,
        source=SEQUENCE + SEQUENCE // 2 if getattr(config.model, "two_streams", False) else 0,
        types=getattr(config.model, "type_vocab_size", 0),
        frozen=optim.freeze,
        optim=optim,
    )


def microbatches(config: RunConfig) -> int:
    """Microbatches of a step of the run; 0 where it does not say how large its batch is."""
    return config.train.global_batch_size // (config.train.micro_batch_size * max(config.layout.dp, 1))


def check(case: Case) -> tuple[list[Row], Measured]:
    """The case in its layout against one process."""
    alone = Layout(dp=1, make_vocab_size_divisible_by=case.layout.make_vocab_size_divisible_by)
    (reference,) = run_ranks(1, measure, replace(case, layout=alone, inject=""), timeout=TIMEOUT_S)
    found = run_ranks(case.layout.world, measure, case, timeout=TIMEOUT_S)[0]
    return compare(found, reference, TOLERANCE), found


def main(config: RunConfig, inject: str = "", as_json: bool = False) -> int:
    """Check and report; 0 when every comparison passes, else 1."""
    case = scaled_case(config, inject)
    rows, found = check(case)
    summary = summarise(rows)
    passed = all(row.passes for row in rows)
    if as_json:
        failed = [asdict(row) for row in rows if not row.passes]
        result = {
            "passed": passed,
            "tolerance": TOLERANCE,
            "yours": asdict(config.layout),
            "tested": {"layout": asdict(case.layout), "model": asdict(case.model)},
            "losses": found.losses,
            "checks": {name: asdict(row) for name, row in summary.items()},
            "failed": failed,
        }
        print(json.dumps(result))
    else:
        print("\n".join(report(config, case, rows, summary, passed)))
    return 0 if passed else 1


def summarise(rows: list[Row]) -> dict[str, Row]:
    """The worst row of each kind."""
    kinds = {
        "loss": "loss",
        "gradient norm": "gradient norm",
        "worst initial weight": "initial ",
        "worst gradient": "gradient ",
        "worst weight after 5 steps": "weight ",
    }
    found = {}
    for name, prefix in kinds.items():
        exact = prefix in ("loss", "gradient norm")
        own = [
            r for r in rows if (r.what == prefix if exact else r.what.startswith(prefix) and r.what != "gradient norm")
        ]
        found[name] = max(own, key=lambda r: float("inf") if r.difference != r.difference else r.difference / r.scale)
    return found


# option: the property that says its value with defaults filled in
_AXES = {a: a for a in ("tp", "cp", "pp", "dp", "vpp", "sequence_parallel")}
_AXES |= {"schedule": "schedule_name", "zero": "zero_stage", "recompute": "recompute"}
_EXPERT_AXES = {"ep": "ep", "etp": "expert_tp"}
_SIZES = {a: a for a in ("num_layers", "hidden_size", "num_attention_heads")}
_SIZES |= {"num_key_value_heads": "kv_heads", "head_dim": "head_size", "ffn_hidden_size": "ffn"}
_SIZES |= {"vocab_size": "vocab_size"}


def report(config: RunConfig, case: Case, rows: list[Row], summary: dict[str, Row], passed: bool) -> list[str]:
    """The lines that are printed."""
    yours, tested = config.layout, case.layout
    lines = ["yours -> tested"]
    axes = _AXES | (_EXPERT_AXES if yours.ep > 1 or yours.etp else {})
    named = yours.layers_per_stage or yours.pipeline_layout or tested.layers_per_stage
    axes |= {"layers_per_stage": "layers_per_stage"} if named else {}
    lines += [f"  {n:<20} {_axis(yours, a)} -> {_axis(tested, a)}" for n, a in axes.items()]
    lines += [
        f"  {n:<20} {getattr(config.model, a) or 'unknown'} -> {getattr(case.model, a)}" for n, a in _SIZES.items()
    ]
    of_step = case.global_batch // (case.micro_batch * tested.dp)
    lines += [f"  {'microbatches':<20} {microbatches(config) or 'unknown'} -> {of_step}"]
    lines += [f"  {name:<20} {own} -> {small}" for name, own, small in changed_rules(config, case.optim)]
    several = f"{of_step} microbatch{'es' if of_step > 1 else ''}"
    lines += ["", f"{tested.world} ranks against one process, float64, 5 steps, {several}"]
    lines.append(f"  {'':<28} {'difference':>12} {'of':>10} {'relative':>10}")
    for name, row in summary.items():
        mark = "ok" if row.passes else "FAILS"
        share = row.difference / row.scale
        lines.append(f"  {name:<28} {row.difference:12.3e} {row.scale:10.3e} {share:10.1e}  {mark}  {row.what}")
    failed = [row.what for row in rows if not row.passes]
    if failed:
        lines += ["", f"{len(failed)} of {len(rows)} comparisons are over {TOLERANCE:g}, the worst first:"]
        worst = sorted((r for r in rows if not r.passes), key=lambda r: r.difference / r.scale, reverse=True)
        lines += [f"  {r.what}: {r.difference / r.scale:.2e}" for r in worst[:10]]
    lines += ["", "PASS: this layout gives the numbers of one process" if passed else "FAIL: this layout is wrong"]
    return lines


def _axis(layout: Layout, name: str) -> str:
    value = getattr(layout, name)
    if name == "zero_stage":  # the stage of ZeRO, with -1 (by dp) resolved
        return str(int(value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
