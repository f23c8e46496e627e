"""What a plan says, as values for JSON and as a table for a terminal. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isotron.planner.advice import warnings
from isotron.planner.amounts import in_words
from isotron.planner.block_time import FORMS, Place
from isotron.planner.definitions import utilisation
from isotron.planner.experts import number_of_experts
from isotron.planner.hardware import GIB
from isotron.planner.job import Job
from isotron.planner.memory import KINDS, plan_memory
from isotron.planner.pairs import are_read, rows
from isotron.planner.parameters import count_parameters
from isotron.planner.remedies import remedies
from isotron.planner.search import MARGIN, Candidate, Found, describe, fullest, why
from isotron.planner.time import step_seconds

DAY = 86400.0


def layout_facts(job: Job, place: Place, limit: float, tokens: float) -> dict[str, Any]:
    """Everything about one layout; `tokens` of the whole run, 0 if unknown."""
    seconds, memory = step_seconds(job, place, exact=True), plan_memory(job, place.device.context)
    rank, most = fullest(memory)
    step = seconds.total
    facts: dict[str, Any] = {
        "layout": describe(job.layout),
        "micro_batch_size": job.micro_batch,
        "global_batch_size": job.global_batch,
        "seq_length": job.seq,
        "decoder_rows": rows(job)[1] if are_read(job) else 0,
        "microbatches": job.microbatches,
        "devices": job.world,
        "device": place.device.name,
        "stack": place.stack.name,
        "parameters": count_parameters(job.config),
        "experts": [number_of_experts(job.config), number_of_experts(job.config) // job.layout.ep],
        "memory": {
            "limit": limit,
            "fits": most.total <= limit,
            "fullest_rank": rank,
            "ranks": [{**{k: getattr(b, k) for k in KINDS}, "total": b.total, "host": b.host} for b in memory],
        },
        "time": {"step": step, "kinds": asdict(seconds), "bubble": seconds.bubble / step},
        "tokens_per_s": job.step_tokens / step,
        "utilisation": utilisation(job, step, place.device.peak(FORMS[place.form])),
        "warnings": warnings(job, place.device.node, seconds.bubble / step),
    }
    if tokens:
        facts["run"] = run_facts(job, step, tokens)
    if not facts["memory"]["fits"]:
        facts["remedies"] = [_row(c, text) for text, c in remedies(job, place, limit)]
    return facts


def run_facts(job: Job, step: float, tokens: float) -> dict[str, float]:
    """How long a run over `tokens` takes."""
    steps = tokens / job.step_tokens
    return {
        "tokens": tokens,
        "steps": steps,
        "days": steps * step / DAY,
        "device_hours": steps * step * job.world / 3600,
    }


def _row(c: Candidate, change: str = "") -> dict[str, Any]:
    row = {
        **describe(c.job.layout),
        "micro_batch_size": c.job.micro_batch,
        "step": c.time,
        "memory": c.memory,
        "bubble": c.seconds.bubble / c.time,
        "exact": c.exact,
        "counted": c.counted,
    }
    return {"change": change, **row} if change else row


def search_facts(found: Found) -> dict[str, Any]:
    """What a search saw."""
    return {
        "layouts": found.looked_at,
        "fitting": found.fitting,
        "best": [_row(c) for c in found.best],
        "frontier": [_row(c) for c in found.frontier],
        "compared": [_row(c) for c in found.compared],
        "why": why(found),
    }


# ---- as text ---------------------------------------------------------------------------------------------------------


def _gib(n: float) -> str:
    return f"{n / GIB:.2f}"


def layout_lines(f: Mapping[str, Any]) -> list[str]:
    """One layout for a terminal."""
    of = " of the encoder's rows" if f["decoder_rows"] else ""
    lines = [*size_lines(f), "", *time_lines(f["time"]), "", f"{f['tokens_per_s']:,.0f} tokens/s{of}"]
    for name, u in f["utilisation"].items():
        lines.append(f"  {name:<16} {u['tflops']:8.1f} TFLOP/s per device  {u['of_peak']:6.1%} of the peak")
    if "run" in f:
        r = f["run"]
        lines.append(f"{in_words(r['tokens'])} tokens: {r['steps']:,.0f} steps, {r['days']:.1f} days, "
                     f"{r['device_hours']:,.0f} device-hours")  # fmt: skip
    lines += [f"warning: {w}" for w in f["warnings"]]
    return lines + remedy_lines(f)


def size_lines(f: Mapping[str, Any]) -> list[str]:
    """What of a layout has nothing to do with time."""
    lay, rows = f["layout"], f["decoder_rows"]
    tokens = f"{f['seq_length']} + {rows}" if rows else f["seq_length"]
    return [
        f"{f['parameters'] / 1e9:.2f} billion parameters on {f['devices']} x {f['device']}, "
        f"efficiencies of {f['stack']}",
        "  ".join(f"{k} {v}" for k, v in lay.items()),
        f"microbatch {f['micro_batch_size']} x {tokens} tokens, {f['microbatches']} microbatches, "
        f"{f['global_batch_size']} sequences per step",
        *expert_lines(f["experts"], lay["ep"]),
        "",
        *memory_lines(f["memory"], lay["pp"]),
    ]


def expert_lines(experts: Sequence[int], ep: int) -> list[str]:
    """How experts are dealt, and what the bytes of their tokens take for granted."""
    if experts[0] == 1:
        return []
    return [f"{experts[0]} experts over ep {ep}, {experts[1]} on every rank; tokens are taken to visit all alike"]


def memory_lines(memory: Mapping[str, Any], ranks: int) -> list[str]:
    """GiB by kind of the fullest device of the first, the fullest and the last pipeline rank."""
    shown = sorted({0, memory["fullest_rank"], ranks - 1})
    lines = [f"{'GiB at most on':<18}" + "".join(f"{f'pp rank {r}':>12}" for r in shown)]
    for kind in (*KINDS, "total", "host"):
        values = [memory["ranks"][r][kind] for r in shown]
        if any(values):
            lines.append(f"  {kind:<16}" + "".join(f"{_gib(v):>12}" for v in values))
    verdict = "fits" if memory["fits"] else "OUT OF MEMORY"
    return [*lines, f"  {'limit':<16}{_gib(memory['limit']):>12}  {verdict}"]


def time_lines(time: Mapping[str, Any]) -> list[str]:
    """Seconds of a step by kind."""
    lines = [f"{'seconds of a step':<18}{time['step']:>10.3f}"]
    for kind, v in time["kinds"].items():
        if v > 1e-4 * time["step"]:
            lines.append(f"  {kind:<16}{v:>10.3f}{v / time['step']:>8.1%}")
    return lines


def remedy_lines(f: Mapping[str, Any]) -> list[str]:
    """Changes that make a layout fit."""
    if f["memory"]["fits"]:
        return []
    if not f["remedies"]:
        return ["no single change makes it fit; leave the layout out and let it be searched"]
    lines = ["changes that fit:"]
    for r in f["remedies"]:
        lines.append(f"  {r['change']:<42} {r['memory'] / GIB:7.1f} GiB  {r['step']:9.3f} s")
    return lines


HEAD = (
    f"{'tp':>3} {'cp':>3} {'ep':>3} {'pp':>3} {'dp':>5} {'zero':>6} {'vpp':>3} {'mbs':>3} {'schedule':<12} "
    f"{'recompute':<10} "
    f"{'step s':>9} {'GiB':>7} {'bubble':>7}"
)


def _zero(r: Mapping[str, Any]) -> str:
    return f"{r['zero']}/{r['zero_shard_size']}" if r["zero_shard_size"] else str(r["zero"])


def candidate_line(r: Mapping[str, Any]) -> str:
    """One row of a list of layouts."""
    return (
        f"{r['tp']:>3} {r['cp']:>3} {r['ep']:>3} {r['pp']:>3} {r['dp']:>5} {_zero(r):>6} {r['vpp']:>3} "
        f"{r['micro_batch_size']:>3} {r['schedule']:<12} "
        f"{r['recompute']:<10} {r['step']:>9.3f} {r['memory'] / GIB:>7.1f} {r['bubble']:>7.1%}"
        + ("" if r["exact"] else "  (seconds by closed form)" if r["counted"] else "  (closed form)")
    )


def search_lines(s: Mapping[str, Any], limit: float) -> list[str]:
    """The list of layouts for a terminal."""
    lines = [
        f"{s['layouts']} legal layouts, {s['fitting']} fit into {limit / GIB:.1f} GiB by closed form",
        "",
        "fastest",
        HEAD,
    ]
    lines += [candidate_line(r) for r in s["best"]]
    lines += ["", "frontier: nothing is both faster and smaller", HEAD]
    lines += [candidate_line(r) + ("" if r["memory"] <= limit else "  over the limit") for r in s["frontier"]]
    for r in s["compared"]:
        lines += ["", "the fastest of the other way to hold weights", HEAD, candidate_line(r)]
    return [*lines, "", s["why"]]


def default_limit(place: Place) -> float:
    """Bytes that a plan may use of a device."""
    return place.device.memory * MARGIN


def scaling_facts(jobs: Sequence[Job], place: Place) -> list[dict[str, Any]]:
    """One row per number of devices; efficiency is tokens per second and device against the first row's."""
    rows: list[dict[str, Any]] = []
    for job in jobs:
        seconds = step_seconds(job, place)
        rate = job.step_tokens / seconds.total / job.world
        mfu = utilisation(job, seconds.total, place.device.peak(FORMS[place.form]))["megatron"]["of_peak"]
        rows.append({"devices": job.world, **describe(job.layout), "global_batch_size": job.global_batch,
                     "step": seconds.total, "tokens_per_s_per_device": rate, "mfu": mfu,
                     "efficiency": rate / rows[0]["tokens_per_s_per_device"] if rows else 1.0})  # fmt: skip
    return rows


def scaling_lines(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """The curve for a terminal."""
    head = f"{'devices':>8} {'tp':>3} {'pp':>3} {'dp':>5} {'batch':>7} {'step s':>9} {'tokens/s/dev':>13} "
    head += f"{'MFU':>7} {'eff.':>6}"
    lines = [f"{kind} scaling", head]
    for r in rows:
        lines.append(
            f"{r['devices']:>8} {r['tp']:>3} {r['pp']:>3} {r['dp']:>5} {r['global_batch_size']:>7} {r['step']:>9.3f} "
            f"{r['tokens_per_s_per_device']:>13.1f} {r['mfu']:>7.1%} {r['efficiency']:>6.1%}"
        )
    return lines
