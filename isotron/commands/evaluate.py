"""`isotron evaluate`: numbers of a model on tasks, the same in every layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from isotron.commands.generate import TOKENIZER, model_config
from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import parse
from isotron.config.catalogue import Option, catalogue
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem, Refused
from isotron.evaluate.examples import QUESTIONS
from isotron.evaluate.tasks import HARNESS, TASKS, missing, read_tasks

OWN = {
    o.name: o
    for o in (
        Option("task", "strs", (), f"NAME=PATH, several of them; NAME is one of {', '.join(TASKS)}; or {HARNESS}=NAME"),
        Option("valid_data", "strs", (), "the data of a --task that is a name alone"),
        Option("overlapping_eval", "int", 32, "tokens between windows of wikitext103 and perplexity; 0: they do not "
               "overlap", unit="tokens"),
        Option("strict_lambada", "bool", False, "lambada asks for the whole last word, not the last token"),
        Option("json_keys", "strs", ("text",), "key of the text in JSON"),
        Option("limit", "int", 0, "examples of a task at most (documents, windows); 0 means all"),
        Option("examples_to", "str", "", "write the examples of mnli, qqp or race to this prefix, to be trained on by "
               "isotron finetune, and score nothing"),
        Option("harness_path", "str", "", "directory with further task files of lm-eval"),
    )
}  # fmt: skip
OWN |= JSON
NAMES = ("load", "tp", "pp", "dp", "cp", "ep", "device", "dtype", "seq_length", "micro_batch_size")
SHARED = {n: catalogue()[n] for n in NAMES}
MOST = 10**15  # examples
ROWS = 8  # of a microbatch, unless --micro-batch-size says otherwise


def run(words: Sequence[str]) -> int:
    """Evaluate as the words say; returns the exit code."""
    from isotron.launch import from_environment, run_local

    parsed = parse(words, {**OWN, **SHARED, **TOKENIZER})
    values = {n: o.default for n, o in OWN.items()} | {k: g.value for k, g in parsed.given.items()}
    for name in ("task", "valid_data"):
        values[name] = [word for words in parsed.repeated.get(name, []) for word in words]
    problems = [*parsed.problems, *_problems(values)]
    tasks: list[tuple[str, str]] = []
    try:
        tasks = read_tasks(values["task"], values["valid_data"])
        problems += [*missing(tasks), *_writable(tasks, values["examples_to"])]
    except Refused as refused:
        problems += refused.problems
    world = from_environment()
    config = model_config(parsed, problems, None if world is None else world.size, SHARED)
    problems += _window(config, "seq_length" in parsed.given)
    if problems:
        raise Refused(problems)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    options = {n: values[n] for n in OWN} | {"task": tasks, "rows": values.get("micro_batch_size", ROWS)}
    processes = 1 if world is not None else config.layout.world
    return run_local("isotron.commands.evaluate_rank:main", processes, (config, options))


def _problems(values: dict[str, Any]) -> list[Problem]:
    rules = (
        ("evaluate without --task", bool(values["task"]), "it says what is measured", "--task lambada=PATH"),
        (f"--overlapping-eval {values['overlapping_eval']}", values["overlapping_eval"] >= 0,
         "windows begin so many tokens apart, or 0: they do not overlap", "--overlapping-eval 32"),
        (f"--limit {values['limit']}", 0 <= values["limit"] <= MOST,
         f"it is a number of examples, at most {MOST}, or 0: all of them", "--limit 100"),
        (f"--json-keys {' '.join(values['json_keys'])}", len(values["json_keys"]) == 1, "one text of a line is read",
         "--json-keys text"),
        (f"--micro-batch-size {values.get('micro_batch_size')}", values.get("micro_batch_size", 1) >= 1,
         "a pass takes one row or more", f"--micro-batch-size {ROWS}"),
    )  # fmt: skip
    return [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]


def _writable(tasks: Sequence[tuple[str, str]], prefix: str) -> list[Problem]:
    if not prefix or (len(tasks) == 1 and tasks[0][0] in QUESTIONS):
        return []
    asked = f"--examples-to {prefix} --task {' '.join(f'{n}={p}' for n, p in tasks)}"
    case = f"the examples of one task are written, of {', '.join(QUESTIONS)}"
    return [Problem(asked, case, f"--examples-to {prefix} --task mnli=train.tsv")]


def _window(config: RunConfig, given: bool) -> list[Problem]:
    longest, width = config.model.max_position_embeddings, config.data.seq_length
    if given and longest and width > longest:
        return [Problem(f"--seq-length {width}", f"the model has {longest} positions", f"--seq-length {longest}")]
    if given and width < 1:
        return [Problem(f"--seq-length {width}", "a row has one token or more", f"--seq-length {longest or 1024}")]
    return []


def help_text() -> str:
    """The options of evaluate."""
    groups = {"[command]": OWN.values(), "[run]": SHARED.values(), "[tokenizer]": TOKENIZER.values()}
    return options_help("isotron evaluate --load DIR --task NAME=PATH [NAME=PATH ..]", groups)
