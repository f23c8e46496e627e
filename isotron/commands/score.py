"""`isotron score`: log-probability of every token of a text, by the training forward and by the inference path."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isotron.commands.generate import SHARED, TOKENIZER, model_config
from isotron.commands.helptext import options_help
from isotron.config.argv import parse
from isotron.config.catalogue import Option
from isotron.core.errors import Problem, Refused
from isotron.evaluate.files import texts
from isotron.inference.config import EngineConfig

OWN = {
    o.name: o
    for o in (
        Option("text", "strs", (), "a text to score; repeat it for several; without it and input, lines of stdin"),
        Option("input", "str", "", "JSON Lines with the texts"),
        Option("json_keys", "strs", ("text",), "key of the text in JSON"),
        Option("chunk", "int", 512, "tokens of a text that the inference path takes at once", unit="tokens"),
        Option("page", "int", 64, "tokens of a page of the cache", unit="tokens"),
        Option("tolerance", "float", 0.0, "exit with 1 when the two paths differ by more; 0 means never"),
        Option("json", "bool", False, "print one JSON object per text, and one with the largest difference"),
    )
}


def run(words: Sequence[str]) -> int:
    """Score as the words say; 1 where the paths differ by more than the tolerance."""
    from isotron.launch import from_environment, run_local

    parsed = parse(words, {**OWN, **SHARED, **TOKENIZER})
    values = {n: o.default for n, o in OWN.items()} | {k: g.value for k, g in parsed.given.items()}
    values["text"] = [" ".join(words) for words in parsed.repeated.get("text", [])]
    problems = [*parsed.problems, *_problems(values)]
    world = from_environment()
    config = model_config(parsed, problems, None if world is None else world.size)
    if problems:
        raise Refused(problems)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    options = {n: values[n] for n in OWN} | {"text": _texts(values)}
    processes = 1 if world is not None else config.layout.world
    return run_local("isotron.commands.score_rank:main", processes, (config, options))


def _problems(values: dict[str, Any]) -> list[Problem]:
    missing = bool(values["input"]) and not Path(values["input"]).is_file()
    rules = (
        (f"--input {values['input']}", not missing, "there is no such file", "--input texts.jsonl"),
        (f"--input {values['input']} --text", not (values["input"] and values["text"]), "texts come from one of them",
         "--input alone"),
        (f"--json-keys {' '.join(values['json_keys'])}", len(values["json_keys"]) == 1, "one text of a line is read",
         "--json-keys text"),
        (f"--tolerance {values['tolerance']}", values["tolerance"] >= 0, "it is a difference in nats, or 0",
         "--tolerance 1e-5"),
    )  # fmt: skip
    own = [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]
    return [*own, *EngineConfig(page=values["page"], chunk=values["chunk"]).problems()]


def _texts(values: dict[str, Any]) -> list[str]:
    if values["input"]:
        found = list(texts("score", Path(values["input"]), values["json_keys"][0]))
    else:
        found = values["text"] or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not any(found):
        raise Refused([Problem("score without a text", "there is nothing to score", '--text "Once upon a time"')])
    return [text for text in found if text]


def as_text(rows: Sequence[dict[str, Any]], largest: float) -> str:
    """One line per text."""
    lines = [f"{'tokens':>8}{'log-probability':>18}{'difference':>14}  text"]
    for row in rows:
        start = json.dumps(row["text"][:48], ensure_ascii=False)
        lines.append(f"{len(row['tokens']):>8}{sum(row['logprobs']):>18.6f}{row['max_difference']:>14.3e}  {start}")
    return "\n".join([*lines, f"largest difference per token between the two paths: {largest:.3e}"])


def help_text() -> str:
    """The options of score."""
    groups = {"[command]": OWN.values(), "[run]": SHARED.values(), "[tokenizer]": TOKENIZER.values()}
    return options_help('isotron score --load DIR --text "TEXT" [--text "TEXT" ..]', groups)
