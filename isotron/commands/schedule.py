"""`isotron schedule NAME`: a pipeline schedule as a grid, its bubble and memory, as a picture, a trace and a table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import parse
from isotron.config.catalogue import Option
from isotron.core.errors import Problem, Refused, refuse
from isotron.core.parallel.pipeline import registry
from isotron.core.parallel.pipeline.draw import grid
from isotron.core.parallel.pipeline.events import predicted, trace_file
from isotron.core.parallel.pipeline.live import chooses_sums
from isotron.core.parallel.pipeline.picture import svg
from isotron.core.parallel.pipeline.study import Study, Target, study, target
from isotron.core.parallel.pipeline.tables import is_file, read, to_csv

OWN = {
    "pp": Option("pp", "int", 4, "pipeline ranks"),
    "microbatches": Option("microbatches", "int", 0, "microbatches per step; 0 means what the batch sizes make, or 8"),
    "global_batch_size": Option("global_batch_size", "int", 0, "sequences per step over all ranks, for microbatches"),
    "micro_batch_size": Option("micro_batch_size", "int", 1, "sequences per microbatch", unit="sequences"),
    "dp": Option("dp", "int", 1, "data-parallel ranks that share the global batch"),
    "vpp": Option("vpp", "ints", (), "stages per rank; several numbers compare them: 1,2,3"),
    "microbatch_group": Option("microbatch_group", "int", 0, "microbatches per chunk at a time, interleaved; 0: pp"),
    "schedule_memory": Option(
        "schedule_memory", "float", 0.0, "auto: most microbatches that a rank keeps; 0 means as many as 1f1b, pp"
    ),
    "schedule_costs": Option(
        "schedule_costs", "ints", (), "of a rank's layers, or of every stage: forward, input and weight gradient[, way]"
    ),
    "schedule_costs_from": Option("schedule_costs_from", "str", "", "take them from a trace of isotron train --trace"),
    "target_bubble": Option("target_bubble", "float", 0.0, "also say what batch gives this bubble, in percent"),
    "zero": Option(
        "zero",
        "int",
        0,
        "0 to 3, what is sharded; from 2 on also show when gradients are summed, at 3 what is gathered",
    ),
    "max_live_gradients": Option(
        "max_live_gradients", "int", 0, "under zero 2 and 3, gradients that may wait on a rank", unit="stages"
    ),
    "max_live_parameters": Option(
        "max_live_parameters", "int", 0, "under zero 3, weights that may stay gathered on a rank", unit="stages"
    ),
    "svg": Option("svg", "str", "", "write the picture to this file"),
    "trace": Option("trace", "str", "", "write a trace for Perfetto or chrome://tracing to this file"),
    "table": Option("table", "str", "", "write the table to this file, .txt or .csv; --schedule FILE trains with it"),
    "width": Option("width", "int", 0, "columns of the grid; 0 means the terminal's"),
    **JSON,
}
KEY = "> forward, < backward or input gradient, w weight gradient, . idle; letters tell a rank's stages apart"
SUMS = "\nbelow: when gradients of a stage are summed over data-parallel ranks (r, or its letter)"


def run(words: Sequence[str]) -> int:
    """Show a schedule as the words ask; returns the exit code."""
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("--") else ("", words)
    parsed = parse(rest, OWN)
    values = {n: o.default for n, o in OWN.items()} | {k: g.value for k, g in parsed.given.items()}
    problems = [*parsed.problems, *_problems(name, values, parsed.doubtful)]
    if problems:
        raise Refused(problems)
    table = read(name) if is_file(name) else None
    p = len(table.ranks) if table else values["pp"]
    m = table.microbatches if table else _microbatches(values)
    stages = (table.stages // p,) if table else values["vpp"] or (0,)
    if values["schedule_costs_from"]:
        values["schedule_costs"] = _measured(values["schedule_costs_from"])
    studies = [
        study(name, p, m, v, values["microbatch_group"], values["schedule_memory"], values["schedule_costs"])
        for v in stages
    ]
    if values["zero"] >= 2:
        live = values["max_live_parameters"] if values["zero"] == 3 else 0
        studies = [s.sharded(values["max_live_gradients"], live) for s in studies]
    if not 0 <= values["target_bubble"] < 100:
        asked = f"--target-bubble {values['target_bubble']:g}"
        raise refuse(asked, "a bubble is a share of a step, in percent above 0 and below 100", "--target-bubble 15")
    wanted = [target(s, values["target_bubble"] / 100) for s in studies] if values["target_bubble"] else []
    _write(studies[0], values)
    if values["json"]:
        facts = [_facts(s, t, values) for s, t in _beside(studies, wanted)]
        print(json.dumps(facts if len(facts) > 1 else facts[0]))
    else:
        print("\n".join(_lines(studies, wanted, values)))
    return 0


def _measured(path: str) -> tuple[int, ...]:
    """What the stages of a traced step took; refuses a file that is not such a trace."""
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))["otherData"]
        return tuple(int(n) for n in facts["schedule_costs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        case = f"it is not a trace of a step: {type(error).__name__} {error}"
        raise refuse(
            f"--schedule-costs-from {path}", case, "RUN/trace/step_00000002.json of a train --trace 2"
        ) from None


def _problems(name: str, values: dict[str, Any], doubtful: set[str]) -> list[Problem]:
    """Everything wrong with the request that the schedules themselves would not say."""
    found = []
    if not name:
        case = f"the schedules are {', '.join(registry.NAMES)}, or the path of a table"
        found.append(Problem("isotron schedule without a name", case, "isotron schedule zbv --pp 4 --microbatches 8"))
    elif name not in registry.NAMES and not is_file(name):
        found += registry.unknown(name).problems
    share = values["micro_batch_size"] * values["dp"]
    for leaf in {"pp", "micro_batch_size", "dp"} - doubtful:
        if values[leaf] < 1:
            flag = OWN[leaf].flag
            found.append(Problem(f"{flag} {values[leaf]}", "there is at least one", f"{flag} 1"))
            share = 1
    batch = values["global_batch_size"]
    if not values["microbatches"] and batch and (batch < share or batch % share):
        case = f"every rank has whole microbatches: a multiple of {values['micro_batch_size']} x {values['dp']}"
        found.append(
            Problem(f"--global-batch-size {batch}", case, f"--global-batch-size {max(1, batch // share) * share}")
        )
    for leaf, end in (("svg", ".svg"), ("trace", ".json")):
        if values[leaf] and not values[leaf].endswith(end):
            flag = OWN[leaf].flag
            found.append(Problem(f"{flag} {values[leaf]}", f"the file is written as {end}", f"{flag} schedule{end}"))
    zero = values["zero"]
    if zero not in (0, 1, 2, 3):
        found.append(Problem(f"--zero {zero}", "what is sharded is 0, 1, 2 or 3", "--zero 2"))
    for leaf, least in (("max_live_gradients", 2), ("max_live_parameters", 3)):
        if values[leaf] < 0 or (values[leaf] and zero < least):
            asked = f"{OWN[leaf].flag} {values[leaf]} --zero {zero}"
            case = f"a number of stages, under zero {least} or more; elsewhere all of them are kept"
            found.append(Problem(asked, case, f"{OWN[leaf].flag} 1 --zero {least}"))
    if values["table"] and not is_file(values["table"]):
        found.append(Problem(f"--table {values['table']}", "a table is .txt or .csv", "--table schedule.csv"))
    return found


def _microbatches(values: dict[str, Any]) -> int:
    share = values["micro_batch_size"] * values["dp"]
    return int(values["microbatches"] or values["global_batch_size"] // share or 8)


def _beside(studies: list[Study], wanted: list[Target]) -> list[tuple[Study, Target | None]]:
    return list(zip(studies, wanted, strict=True)) if wanted else [(s, None) for s in studies]


def _write(shown: Study, values: dict[str, Any]) -> None:
    """The files that were asked for."""
    title = f"{shown.table.name}, {shown.p} ranks, {shown.m} microbatches, bubble {100 * shown.bubble:.2f} %"
    if values["svg"]:
        Path(values["svg"]).write_text(svg(shown.table, shown.report, title), encoding="utf-8")
    if values["trace"]:
        trace = trace_file(
            predicted(shown.report), 1000.0 / shown.unit, {"schedule": title, "unit": f"1 ms: {shown.unit_name}"}
        )
        Path(values["trace"]).write_text(json.dumps(trace), encoding="utf-8")
    if values["table"]:
        text = to_csv(shown.table) if values["table"].endswith(".csv") else shown.table.to_text()
        Path(values["table"]).write_text(text, encoding="utf-8")


def _lines(studies: list[Study], wanted: list[Target], values: dict[str, Any]) -> list[str]:
    """What is printed: the grid of one schedule, then a line of figures for each."""
    first = studies[0]
    per_step = f"{first.m} microbatches"
    if values["global_batch_size"] and not values["microbatches"]:
        per_step += f" ({values['global_batch_size']} sequences / {values['micro_batch_size']} x {values['dp']})"
    lines = [f"{first.table.name}: {first.p} ranks, {per_step}, stages on ranks {_placed(first)}", ""]
    if len(studies) == 1:
        key = KEY + (SUMS if chooses_sums(first.table) else "")
        lines += [*_cut(grid(first.table, first.costs), values["width"]), key, ""]
    head = f"{'schedule':<14} {'stages/rank':>11} {'bubble':>9} {'own idle':>9} {'kept':>8} {'time':>10} {'waits':>8}"
    lines.append(head)
    for s in studies:
        idle = max(s.report.idle) / s.work
        lines.append(
            f"{s.table.name:<14} {s.v:>11} {100 * s.bubble:>7.2f} % {100 * idle:>7.2f} % {s.kept:>8.2f} "
            f"{s.time:>10.6g} {max(s.waits):>8.3g}"
        )
    if values["schedule_costs_from"]:
        lines += ["", f"measured: --schedule-costs {','.join(map(str, values['schedule_costs']))}"]
    lines += ["", "bubble: idle over busy time; own idle: between a rank's own first and last action, at most;"]
    lines += ["kept: activations in microbatches of a whole rank, at most; waits: for transfers alone, at most;"]
    lines += [f"time: of a step, as waits in {first.unit_name}"]
    if values["zero"] >= 2:
        lines += [_sharded_line(s, values["zero"]) for s in studies]
    for s, t in _beside(studies, wanted):
        if t is not None:
            lines.append(_target_line(s, t, values))
    return lines


def _sharded_line(s: Study, zero: int) -> str:
    """What a rank of a sharded run sums, keeps waiting and gathers, in gradients and weights of a stage."""
    report = s.report
    found = (
        f"zero {zero}, {s.table.name}: a rank sums gradients of {max(report.sums):g} stages in a step, and those of "
    )
    found += f"{max(report.waiting):g} wait at most"
    return found + (f"; it gathers weights of {max(report.gathers):g} and holds {max(report.gathered):g}" * (zero == 3))


def _placed(s: Study) -> str:
    home = ",".join(map(str, s.table.placement))
    return home if len(home) <= 48 else home[:45] + "..."


def _target_line(s: Study, t: Target, values: dict[str, Any]) -> str:
    share = values["micro_batch_size"] * values["dp"]
    near = ", ".join(f"{m} ({m * share} sequences) give {100 * bubble:.2f} %" for m, bubble in t.near)
    batch = f"a global batch of {t.exact * share:.0f} sequences"
    return f"{100 * t.bubble:g} % with {s.table.name}, {s.v} per rank: {t.exact:.2f} microbatches, {batch}; {near}"


def _cut(rows: list[str], width: int) -> list[str]:
    """The grid as wide as the terminal, with a mark where it goes on."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    if max(map(len, rows)) <= width:
        return rows
    return [f"{row[: max(20, width) - 4]} ..." for row in rows]


def _facts(s: Study, t: Target | None, values: dict[str, Any]) -> dict[str, Any]:
    share = values["micro_batch_size"] * values["dp"]
    facts = s.facts()
    if t is not None:
        facts["target"] = {
            "bubble": t.bubble,
            "microbatches": t.exact,
            "global_batch_size": t.exact * share,
            "near": [{"microbatches": m, "global_batch_size": m * share, "bubble": b} for m, b in t.near],
        }
    return facts


def help_text() -> str:
    """The options of schedule."""
    usage = f"isotron schedule NAME [--OPTION VALUE ..]\n\nNAME: {', '.join(registry.NAMES)}, or the path of a table"
    return options_help(usage, {"[command]": OWN.values()})
