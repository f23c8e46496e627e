"""`isotron plan`: bytes, seconds and the best layout of a model on devices that need not be there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from isotron.commands.run_options import JSON, run_help
from isotron.config.catalogue import Option
from isotron.config.check import check, finish
from isotron.config.load import Loaded, read
from isotron.config.schema import MODELS, PRESETS, RunConfig, changed, to_toml
from isotron.core.errors import Problem, Refused, refuse
from isotron.planner import report
from isotron.planner.amounts import amount, whole_steps
from isotron.planner.block_time import Place
from isotron.planner.budget import within_budget
from isotron.planner.efficiency import STACKS, stack_for
from isotron.planner.hardware import GIB, find
from isotron.planner.job import Job
from isotron.planner.page import page
from isotron.planner.search import Found, named, search
from isotron.planner.shapes import MILESTONES
from isotron.progress import ticking

OWN = {
    "model": Option("model", "str", "", "a preset or a milestone; the sizes of a run's own options otherwise"),
    "gpus": Option("gpus", "int", 0, "number of devices; 0 means those of the layout"),
    "gpu": Option("gpu", "str", "h100", "kind of device, or a .toml file that describes one"),
    "seq": Option("seq", "int", 0, "tokens per sequence; like --seq-length"),
    "global_batch": Option("global_batch", "int", 0, "sequences per step; like --global-batch-size"),
    "memory_limit": Option("memory_limit", "float", 0.0, "what a device may hold; 0 means 94 % of it", unit="GiB"),
    "tokens": Option("tokens", "str", "", "tokens of the whole run (300B, 1.5T, 300e9), for days and device-hours"),
    "stack": Option("stack", "str", "", f"whose fitted efficiencies: {', '.join(STACKS)}; empty means the device's"),
    "scaling": Option("scaling", "str", "", "curve over numbers of devices", choices=("", "weak", "strong")),
    "top": Option("top", "int", 10, "layouts to show"),
    "out": Option("out", "str", "", "write the best layout as a run's TOML file"),
    "html": Option("html", "str", "", "write the plan as one HTML page: memory, time, pipeline, frontier, candidates"),
    "calibrate": Option("calibrate", "str", "", "measure this machine, write a .toml file for --gpu, and stop"),
    **JSON,
}
SEARCHED = (
    *("tp", "pp", "dp", "cp", "ep", "vpp", "schedule", "recompute", "zero", "zero_shard_size"),
    *("layers_per_stage", "pipeline_layout"),
)
# leaves of the layout that a search decides
DECIDED = (
    *("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "sequence_parallel", "zero", "zero_shard_size", "schedule"),
    *("recompute", "recompute_method", "recompute_num_layers"),
)
# a plan reads no data, no tokenizer and no checkpoint, and the devices need not be here
UNUSED = (
    *("data_path", "valid_data_path", "mock_data", "split", "train_iters", "device", "save", "load"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "lr_warmup_iters", "lr_wsd_decay_iters"),
)
TYPICAL = {"seq_length": 4096, "global_batch_size": 1024, "vocab_size": 50304}
SCALES = (1, 2, 4, 8, 16)


def run(words: Sequence[str]) -> int:
    """Plan as the words ask; returns the exit code."""
    name, words = _model(words)
    loaded = read(words, None, OWN)
    flags = {k: g.value for k, g in loaded.flags.items()}
    flags = {k: o.default for k, o in OWN.items()} | {k: v for k, v in flags.items() if k in OWN} | {"model": name}
    if loaded.problems:
        raise Refused(loaded.problems)
    if flags["gpus"] < 0:
        raise refuse(f"--gpus {flags['gpus']}", "devices are counted from 1; 0 means those of the layout", "--gpus 8")
    origins = ("flag", loaded.flags["config"].value if "config" in loaded.flags else "flag")
    if flags["calibrate"]:
        from isotron.commands import calibrate

        print("\n".join(calibrate.write(flags["calibrate"])))
        return 0
    given = {k for k, origin in loaded.provenance.items() if origin.startswith(origins)}
    given |= {k for k in SEARCHED if k in loaded.flags}
    device = find(flags["gpu"] if "gpu" in loaded.flags or name not in MILESTONES else MILESTONES[name][2])
    config = _settled(loaded, flags, name, given)
    place = Place(
        device, stack_for(device.name, flags["stack"]), "32bit" if config.train.dtype == "float32" else "16bit"
    )
    limit = flags["memory_limit"] * GIB or report.default_limit(place)
    tokens = amount("--tokens", flags["tokens"] or (f"{MILESTONES[name][5]:g}B" if name in MILESTONES else "0"))
    shape = MILESTONES[name][0] if name in MILESTONES else config.model
    if given.intersection(SEARCHED):
        facts = _one(config, shape, flags, place, limit, tokens)
    else:
        facts = _search(config, shape, flags, place, limit, tokens)
    print(json.dumps(facts, indent=1) if flags["json"] else "\n".join(facts["lines"]))
    return 0


def _model(words: Sequence[str]) -> tuple[str, list[str]]:
    """The value of --model, and the words with it as --preset where it is one of isotron's."""
    rest, name = list(words), ""
    for i, word in enumerate(rest[:-1]):
        if word == "--model":
            name = rest[i + 1]
    if not name:
        return "", rest
    if name in MILESTONES:
        return name, rest
    if name in PRESETS:
        return name, [*rest, "--preset", name]
    near = get_close_matches(name, [*MILESTONES, *PRESETS], n=1) or ["llama3-8b"]
    case = f"the milestones are {', '.join(MILESTONES)}; the presets {', '.join(PRESETS)}"
    raise refuse(f"--model {name}", case, f"--model {near[0]}")


def _settled(loaded: Loaded, flags: Mapping[str, Any], name: str, given: set[str]) -> RunConfig:
    """The run config with batch, sequence and dtype filled in where nobody named them."""
    config = loaded.config
    milestone = MILESTONES.get(name)
    if milestone is not None and type(milestone[0]) in MODELS.values():
        config = replace(config, model=milestone[0])
    leaves: dict[str, Any] = {}
    if flags["seq"]:
        leaves["seq_length"] = flags["seq"]
    elif "seq_length" not in given:
        leaves["seq_length"] = (
            milestone[3] if milestone else config.model.max_position_embeddings or TYPICAL["seq_length"]
        )
        leaves["seq_length"] = min(leaves["seq_length"], 8192)
    if flags["global_batch"]:
        leaves["global_batch_size"] = flags["global_batch"]
    elif "global_batch_size" not in given:
        leaves["global_batch_size"] = milestone[4] if milestone else TYPICAL["global_batch_size"]
    if "dtype" not in given:
        leaves["dtype"] = "bfloat16"
    if not config.model.vocab_size:
        leaves["vocab_size"] = TYPICAL["vocab_size"]
    seq = leaves.get("seq_length", config.data.seq_length)
    if config.model.max_position_embeddings < seq and config.model.max_position_embeddings:
        leaves["max_position_embeddings"] = seq
    return changed(config, device="cpu", **leaves)


def _one(
    config: RunConfig, shape: Any, flags: Mapping[str, Any], place: Place, limit: float, tokens: float
) -> dict[str, Any]:
    """The layout that was given, and its curve over devices where one is asked for."""
    lay = config.layout
    if flags["gpus"] and not lay.dp:
        unit = lay.tp * lay.pp * lay.cp
        if flags["gpus"] % unit:
            cp = f" x cp {lay.cp}" if lay.cp > 1 else ""
            case = f"tp {lay.tp} x pp {lay.pp}{cp} = {unit} devices per replica, which do not divide {flags['gpus']}"
            raise refuse(
                f"--gpus {flags['gpus']} --tp {lay.tp} --pp {lay.pp}",
                case,
                f"--gpus {-(-flags['gpus'] // unit) * unit}",
            )
        config = changed(config, dp=flags["gpus"] // unit)
    problems = check(config, None, 0, config.model.vocab_size, UNUSED)
    if flags["gpus"] and lay.dp and lay.world != flags["gpus"]:
        cp = f" x cp {lay.cp}" if lay.cp > 1 else ""
        case = f"tp {lay.tp} x pp {lay.pp}{cp} x dp {lay.dp} = {lay.world} devices"
        problems.append(Problem(f"--gpus {flags['gpus']} --dp {lay.dp}", case, f"--gpus {lay.world}"))
    if problems:
        raise Refused(problems)
    config, chosen = within_budget(finish(config))
    job = replace(Job.of(config), config=_with_positions(shape, config))
    whole_steps("--tokens", tokens, job.step_tokens)
    if flags["scaling"]:
        rows = report.scaling_facts(_scaled(job, flags["scaling"]), place)
        return {"scaling": flags["scaling"], "rows": rows, "lines": report.scaling_lines(rows, flags["scaling"])}
    facts = report.layout_facts(job, place, limit, tokens)
    lines = [*report.layout_lines(facts), *_written(flags, config, job), *_drawn(flags, facts, job, place)]
    return {**facts, "lines": [*chosen, *lines]}


def _with_positions(shape: Any, config: RunConfig) -> Any:
    return (
        config.model
        if type(shape) in MODELS.values()
        else replace(shape, max_position_embeddings=config.data.seq_length)
    )


def _scaled(job: Job, kind: str) -> list[Job]:
    """The job at multiples of its devices: the batch grows with them (weak) or stays (strong)."""
    found = []
    for k in SCALES:
        batch = job.global_batch * (k if kind == "weak" else 1)
        dp = job.dp * k
        if batch % (job.micro_batch * dp) == 0:
            found.append(replace(job.with_layout(dp=dp, zero=max(job.layout.zero, int(dp > 1))), global_batch=batch))
    return found


def _search(
    config: RunConfig, shape: Any, flags: Mapping[str, Any], place: Place, limit: float, tokens: float
) -> dict[str, Any]:
    """All layouts on so many devices."""
    devices = flags["gpus"] or (MILESTONES[flags["model"]][1] if flags["model"] in MILESTONES else 0)
    if not devices:
        case = "neither a number of devices nor a layout is given"
        raise refuse("isotron plan without --gpus", case, "--gpus 64, or a layout such as --tp 4 --pp 2 --dp 8")
    budget = config.layout.activation_budget_gib
    if budget:
        case = "a search chooses what is recomputed by the memory of the device"
        raise refuse(f"--activation-budget-gib {budget:g}", case, "it together with --tp, --pp and --dp")
    config = changed(config, dp=0)
    base = finish(changed(config, micro_batch_size=1), devices)
    job = replace(Job.of(base), config=_with_positions(shape, base))
    whole_steps("--tokens", tokens, job.step_tokens)
    with ExitStack() as stack:
        found = search(job, devices, place, limit, flags["top"], partial(_shown, stack))
    facts: dict[str, Any] = {
        "devices": devices,
        "device": place.device.name,
        "limit": limit,
        **report.search_facts(found),
    }
    lines = report.search_lines(facts, limit)
    if found.best:
        chosen = found.best[0].job
        facts["chosen"] = report.layout_facts(chosen, place, limit, tokens)
        lines = [*lines, "", "the fastest:", *report.layout_lines(facts["chosen"]), *_written(flags, config, chosen)]
        lines += _drawn(flags, facts, chosen, place)
    else:
        lines += _none_fits(found, limit)
    return {**facts, "lines": lines}


def _shown(stack: ExitStack, total: int) -> Callable[[], None]:
    """How far a search is, until the stack is closed."""
    return stack.enter_context(ticking("plan", total))


def _none_fits(found: Found, limit: float) -> list[str]:
    c = found.nearest
    if c is None:
        return []
    need = f"the smallest needs {c.memory / GIB:.1f} GiB of {limit / GIB:.1f}"
    return ["", f"nothing fits: {need}; more --gpus, a kind with more memory, or a shorter --seq", report.HEAD,
            report.candidate_line(report._row(c))]  # fmt: skip


def _written(flags: Mapping[str, Any], config: RunConfig, job: Job) -> list[str]:
    """Writes the run's TOML file where one is asked for; says so."""
    if not flags["out"]:
        return []
    Path(flags["out"]).write_text(run_toml(config, job), encoding="utf-8")
    return [f"written: {flags['out']}; isotron train --config {flags['out']} --print-config shows it"]


def _drawn(flags: Mapping[str, Any], facts: Mapping[str, Any], job: Job, place: Place) -> list[str]:
    """Writes the page where one is asked for; says so."""
    if not flags["html"]:
        return []
    title = f"{flags['model'] or job.config.family} on {job.world} x {place.device.name}"
    Path(flags["html"]).write_text(page(facts, job, place, title), encoding="utf-8")
    return [f"written: {flags['html']}"]


def run_toml(config: RunConfig, job: Job) -> str:
    """A run with this layout that `isotron train` accepts; the data are made up until a path is put in."""
    layout = replace(config.layout, **{name: getattr(job.layout, name) for name in DECIDED})
    chosen = replace(config, layout=layout)
    data = {} if config.data.data_path else {"mock_data": True}
    chosen = changed(
        chosen,
        micro_batch_size=job.micro_batch,
        global_batch_size=job.global_batch,
        train_iters=config.train.train_iters or 1000,
        device="auto",
        **data,
    )
    head = f"# {job.world} devices: {named(layout)}, found by isotron plan\n"
    note = "# mock_data stands for data_path until there is one\n\n" if data else "\n"
    return head + note + to_toml(chosen)


def help_text() -> str:
    """The options of plan."""
    usage = (
        "isotron plan --model NAME --gpus N [--gpu KIND] [--OPTION VALUE ..]\n\nwith a layout (--tp, --pp, ..): what it"
    )
    usage += " takes; without one: the best. Models: " + ", ".join(MILESTONES) + ", and every preset"
    return run_help(usage, OWN)
