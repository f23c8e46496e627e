"""`isotron generate`: continue prompts with the model of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from isotron.commands.generation_options import CHOICE, ENGINE, settled
from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON, device_count
from isotron.config.argv import Parsed, parse
from isotron.config.catalogue import Option, catalogue
from isotron.config.check import check, finish
from isotron.config.load import read
from isotron.config.resume import Found, find_checkpoint
from isotron.config.rules_streams import two_streams
from isotron.config.rules_words import fills_words
from isotron.config.schema import RunConfig, changed
from isotron.core.errors import Problem, Refused

OWN = {
    "prompt": Option(
        "prompt", "strs", (), "text to continue; repeat it for several; without it, lines of stdin that are not blank"
    ),
    "max_new_tokens": Option("max_new_tokens", "int", 64, "tokens to generate for each prompt", unit="tokens"),
    "temperature": Option(
        "temperature", "float", 1.0, "0 takes the likeliest token, 1 samples as the model says; 0 with num_beams"
    ),
    **CHOICE,
    "ignore_eos": Option("ignore_eos", "bool", False, "go on after the end-of-document token"),
    **ENGINE,
    **JSON,
}
SHARED = {n: catalogue()[n] for n in ("load", "tp", "pp", "cp", "ep", "etp", "device", "dtype", "seed")}
TOKENIZER = {n: o for n, o in catalogue().items() if o.section == "tokenizer"}
# a generation has no batch schedule, data or optimizer; the run that wrote the checkpoint was checked for them
UNUSED = (
    *("data_path", "valid_data_path", "mock_data", "split", "train_iters", "global_batch_size", "micro_batch_size"),
    *("lr_warmup_iters", "lr_wsd_decay_iters", "lr_decay_iters", "min_lr", "lr", "seq_length", "loss_scale", "save"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
)


def run(words: Sequence[str]) -> int:
    """Generate as the words say; returns the exit code."""
    from isotron.launch import from_environment, run_local

    parsed = parse(words, {**OWN, **SHARED, **TOKENIZER})
    values = {n: o.default for n, o in OWN.items()} | {k: g.value for k, g in parsed.given.items()}
    if values["num_beams"] > 1 and "temperature" not in parsed.given:
        values["temperature"] = 0.0
    problems = [*parsed.problems, *settled(values, parsed)]
    world = from_environment()
    size = None if world is None else world.size
    config = model_config(parsed, problems, size, pairs=True)
    problems += _of_pairs(values) if two_streams(config) else []
    if problems:
        raise Refused(problems)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    prompts = tuple(" ".join(words) for words in parsed.repeated.get("prompt", [])) or _from_stdin()
    options = {n: values[n] for n in (*OWN, "grammar") if n != "prompt"}
    options |= {"prompts": prompts, "seed": config.train.seed}
    processes = 1 if world is not None else config.layout.world
    return run_local("isotron.inference.generate:main", processes, (config, options))


def model_config(
    parsed: Parsed,
    problems: list[Problem],
    size: int | None,
    shared: Mapping[str, Option] = SHARED,
    pairs: bool = False,
) -> RunConfig:
    """The checkpoint's run in the layout, on the device and in the dtype asked for by the options `shared`. `pairs`:
    the command can do with an encoder and a decoder.
    """
    load = parsed.given["load"].value if "load" in parsed.given else ""
    found = Found()
    if not load and "load" not in parsed.doubtful:
        problems.append(Problem("--load not given", "the model comes from a checkpoint", "--load runs/first"))
    try:
        found = find_checkpoint(load, "", lambda line: print(f"note: {line}", file=sys.stderr))
    except Refused as refused:
        problems += [_said(p) for p in refused.problems]
    base = read([], found.config).config
    asked = {n: g.value for n, g in parsed.given.items() if n in shared or n in TOKENIZER}
    config = changed(base, **{"dp": 1, **asked, "load": found.path, "sequence_parallel": False})
    devices = device_count(config.train.device)
    if fills_words(config):
        case = f"family {config.model.family} fills in masked words: it writes no text, and has no likelihood of one"
        fix = "isotron train, which validates it, or isotron convert DIR RESULT --to hf to use it elsewhere"
        problems.append(Problem(f"--load {load}", case, fix))
    if two_streams(config) and not pairs:
        case = f"family {config.model.family} has an encoder and a decoder, and this command runs decoders alone"
        problems.append(Problem(f"--load {load}", case, "isotron generate, or isotron train, which validates it"))
    if found.config is not None:
        problems += check(config, size, devices, 0, {*UNUSED, *parsed.doubtful})
    return finish(config, size, devices)


def _of_pairs(values: Mapping[str, Any]) -> list[Problem]:
    """What an encoder and a decoder are not asked for."""
    asked = {"num_beams": 1, "speculate": "none", "draft": ""}
    given = {name: values[name] for name, usual in asked.items() if values[name] not in (usual, "auto")}
    case = "an encoder and a decoder write an answer token by token, each the likeliest or drawn"
    return [
        Problem(
            f"--{name.replace('_', '-')} {value}", case, f"--{name.replace('_', '-')} {asked[name] or '(left out)'}"
        )
        for name, value in given.items()
    ]


def _said(problem: Problem) -> Problem:
    """The same problem without the advice to start a new run."""
    return Problem(problem.asked, problem.case.split(", and a mistyped")[0], problem.fix.split(", or --load")[0])


def _from_stdin() -> tuple[str, ...]:
    """One prompt a line that is not blank; a terminal is asked for one."""
    if sys.stdin.isatty():
        print("prompt, then Ctrl-D:", file=sys.stderr)
    prompts = tuple(line.rstrip("\n") for line in sys.stdin if line.strip())
    if not prompts:
        raise Refused(
            [Problem("no --prompt and an empty stdin", "there is nothing to continue", '--prompt "Once upon a time"')]
        )
    return prompts


def help_text() -> str:
    """The options of generate."""
    groups = {"[command]": OWN.values(), "[run]": SHARED.values(), "[tokenizer]": TOKENIZER.values()}
    return options_help('isotron generate --load DIR --prompt "TEXT" [--prompt "TEXT" ..]', groups)
