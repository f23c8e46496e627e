"""`isotron preprocess`: JSON lines to Megatron's .bin/.idx."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import Parsed, parse
from isotron.config.catalogue import Option, catalogue
from isotron.core.errors import Problem, Refused

OWN = {
    "input": Option("input", "strs", (), "JSON-lines files or patterns, also .gz"),
    "output_prefix": Option("output_prefix", "str", "", "writes PREFIX_KEY_document.bin and .idx"),
    "json_keys": Option("json_keys", "strs", ("text",), "keys to tokenize, each to files of its own"),
    "append_eod": Option("append_eod", "bool", False, "end each document with the end-of-document token"),
    "workers": Option("workers", "int", 0, "processes; 0 means the cores of this machine"),
    "on_bad_line": Option(
        "on_bad_line", "str", "error", "what to do with an unreadable record", choices=("error", "skip")
    ),
    **JSON,
}
TOKENIZER = {n: o for n, o in catalogue().items() if o.section == "tokenizer" or n == "vocab_size"}


def run(words: Sequence[str]) -> int:
    """Preprocess as the words say; returns the exit code."""
    parsed = parse(words, {**OWN, **TOKENIZER})
    values = {n: o.default for n, o in {**OWN, **TOKENIZER}.items()} | {k: g.value for k, g in parsed.given.items()}
    tokenizer = _checked(parsed, values)
    from isotron.data.preprocess import preprocess

    as_json = bool(values["json"])
    summary = preprocess(
        values["input"],
        values["output_prefix"],
        tokenizer,
        json_keys=values["json_keys"],
        append_eod=values["append_eod"],
        workers=values["workers"] or None,
        on_bad_line=values["on_bad_line"],
        **({"log": _quiet} if as_json else {}),
    )
    print(json.dumps(asdict(summary)) if as_json else summary)
    return 0


def _quiet(_line: str) -> None:
    """No progress lines on stdout beside a JSON result."""


def _checked(parsed: Parsed, values: dict[str, Any]) -> Any:
    """The tokenizer, once nothing is wrong; every problem is raised at once."""
    from isotron.tokenizers.build import build_tokenizer
    from isotron.tokenizers.config import TokenizerConfig

    problems, tokenizer = list(parsed.problems), None
    if not values["input"] and "input" not in parsed.doubtful:
        problems.append(Problem("--input not given", "there is no text to read", "--input corpus.jsonl"))
    if not values["output_prefix"] and "output_prefix" not in parsed.doubtful:
        fix = f"--output-prefix {Path((values['input'] or ('corpus.jsonl',))[0]).stem.replace('*', 'corpus')}"
        problems.append(Problem("--output-prefix not given", "the files to write have no name", fix))
    if values["workers"] < 0:
        problems.append(
            Problem(f"--workers {values['workers']}", "at least one process is needed", f"--workers {os.cpu_count()}")
        )
    if not parsed.doubtful.intersection(TOKENIZER):
        try:
            fields = {n: values[n] for n in TokenizerConfig.__dataclass_fields__}
            tokenizer = build_tokenizer(TokenizerConfig(**fields), values["vocab_size"])
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise Refused(problems)
    for note in parsed.notes:
        print(f"note: {note}")
    return tokenizer


def help_text() -> str:
    """The options of preprocess."""
    usage = "isotron preprocess --input corpus.jsonl --output-prefix data/corpus TOKENIZER OPTIONS"
    return options_help(usage, {"[command]": OWN.values(), "[tokenizer]": TOKENIZER.values()})
