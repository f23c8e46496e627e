"""A dry run as facts for programs and as lines to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from isotron.config.schema import RunConfig
from isotron.train.dryrun.rank import RankReport

KINDS = ("weights", "gradients", "masters", "moments")


def facts(config: RunConfig, detailed: RankReport, stages: Sequence[RankReport]) -> dict[str, Any]:
    """Everything, as JSON."""
    layout = config.layout
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": max(layout.dp, 1), "pp": layout.pp, "ep": layout.ep}
    return {
        "layout": {**sizes, "world": layout.world, "schedule": layout.schedule_name, "stages": layout.stages},
        "family": config.model.family,
        "dtype": config.train.dtype,
        "sequence": config.data.seq_length,
        "micro_batch_size": config.train.micro_batch_size,
        "rank": _rank(detailed),
        "calls": _calls(detailed),
        "stages": [_rank(r) for r in stages],
        "seconds": detailed.seconds + sum(r.seconds for r in stages if r.rank != detailed.rank),
    }


def _rank(r: RankReport) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": r.rank, "coordinate": r.coordinate, "layers": r.layers, "halves": r.halves}
    found["parameters"] = r.parameters
    for kind in (*KINDS, "states", "activations", "update", "total"):
        found[kind] = getattr(r, kind)
    return {**found, "microbatches": r.microbatches[0], "microbatches_run": r.microbatches[1]}


def _calls(r: RankReport) -> list[dict[str, Any]]:
    ordered = sorted(r.calls.sums.items(), key=lambda item: -item[1].bytes)
    return [
        {
            "function": key.function,
            "axes": list(key.axes),
            "size": key.size,
            "count": sums.count,
            "bytes": sums.bytes,
            "file": key.file,
            "reason": key.reason,
        }
        for key, sums in ordered
    ]


def lines(found: dict[str, Any]) -> list[str]:
    """The same to read."""
    lay, r = found["layout"], found["rank"]
    axes = " x ".join(f"{a} {lay[a]}" for a in ("tp", "cp", "pp", "dp", "ep") if lay[a] > 1) or "one process"
    head = f"dry run: {found['family']} in {found['dtype']}, {axes} = {lay['world']} ranks, {lay['schedule']}, "
    head += f"{r['microbatches']} microbatches of {found['micro_batch_size']} x {found['sequence']}"
    where = ", ".join(f"{axis} {i}" for axis, i in r["coordinate"].items())
    held = f"blocks {spans(r['layers'], r['halves'])}, {r['parameters']:,} weights"
    out = [head, f"rank {r['rank']} ({where}): {held}", _bytes(r)]
    out += ["", "communication of a step:", _row("function", "group", "ranks", "calls", "bytes", "why")]
    for c in found["calls"]:
        group = " x ".join(c["axes"]) or "-"
        out.append(_row(c["function"], group, c["size"], f"{c['count']:,}", amount(c["bytes"]), c["reason"]))
    if not found["calls"]:
        out.append("  none")
    if len(found["stages"]) > 1:
        out += ["", "one rank of each pipeline rank:", STAGE_HEAD, *(_stage(s) for s in found["stages"])]
    run = "" if r["microbatches_run"] == r["microbatches"] else f"; {r['microbatches_run']} microbatches were run"
    return [*out, "", f"{found['seconds']:.1f} s on tensors without memory{run}"]


def _bytes(r: dict[str, Any]) -> str:
    parts = "  ".join(f"{kind} {amount(r[kind])}" for kind in (*KINDS, "activations"))
    return f"  {parts}; at most {amount(r['total'])} at once"


def amount(n: float) -> str:
    """Bytes in the unit that gives a short number."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, (int(n).bit_length() - 1) // 10))
    return f"{n / 1024**power:.4g} {units[power]}"


def _row(function: str, group: str, size: Any, count: str, sent: str, why: str) -> str:
    return f"  {function:<15}{group:<14}{size!s:>6}{count:>10}{sent:>12}  {why}"


STAGE_HEAD = f"  {'rank':>6}{'weights':>12}{'gradients':>12}{'optimizer':>12}{'activations':>13}{'at most':>12}  blocks"


def _stage(r: dict[str, Any]) -> str:
    sizes = (r["weights"], r["gradients"], r["masters"] + r["moments"], r["activations"], r["total"])
    w, g, o, a, t = map(amount, sizes)
    return f"  {r['rank']:>6}{w:>12}{g:>12}{o:>12}{a:>13}{t:>12}  {spans(r['layers'], r['halves'])}"


def spans(numbers: Sequence[int], halves: Sequence[str] = ()) -> str:
    """0-1 32-33 for runs of numbers, 34 (mlp) for the half of one; - for none."""
    parts = zip(numbers, halves or [""] * len(numbers), strict=True)
    runs = [[x for _, x in group] for _, group in groupby(enumerate(parts), key=lambda x: (x[1][0] - x[0], x[1][1]))]
    return " ".join(_span([n for n, _ in run], run[0][1]) for run in runs) or "-"


def _span(run: Sequence[int], half: str) -> str:
    whole = f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
    return f"{whole} ({half})" if half else whole
