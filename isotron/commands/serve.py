"""`isotron serve`: an OpenAI-compatible server for the model of a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from isotron.commands.generate import SHARED, TOKENIZER, model_config
from isotron.commands.generation_options import ENGINE, engine_problems
from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import parse
from isotron.config.catalogue import Option
from isotron.core.errors import Problem, Refused
from isotron.serve.config import LOOPBACK, Limits

_LIMITS = Limits()
KEY = "ISOTRON_API_KEY"
OWN = {
    o.name: o
    for o in (
        Option("host", "str", LOOPBACK[0], "address to listen at; others than this machine's own need an API key"),
        Option("port", "int", 8000, "port to listen at; 0 takes a free one"),
        Option("api_key", "str", "", f"what clients must send as Bearer; better set {KEY} in the environment"),
        Option("served_name", "str", "", "name of the model for clients; empty means that of its run or directory"),
        Option("chat_template", "str", "", "Jinja file for messages; empty means that of the tokenizer"),
        Option("max_new_tokens", "int", 128, "tokens of an answer when a request does not say", unit="tokens"),
        Option("cache_tokens", "int", 0, "tokens that the cache holds; 0 means max_batch sequences, at most 2 GiB",
               unit="tokens"),
        Option("max_waiting", "int", _LIMITS.max_waiting, "answers that may wait; more are turned away with 429"),
        Option("max_answers", "int", _LIMITS.max_answers, "answers of one request"),
        Option("max_body_bytes", "int", _LIMITS.max_body, "bytes of a request", unit="bytes"),
        Option("grace", "int", _LIMITS.grace, "seconds for running requests when told to stop", unit="s"),
    )
}  # fmt: skip


def run(words: Sequence[str]) -> int:
    """Serve as the words say; returns the exit code."""
    from isotron.launch import from_environment, run_local

    options = {**OWN, **ENGINE, **JSON}
    parsed = parse(words, {**options, **SHARED, **TOKENIZER})
    values = {n: o.default for n, o in options.items()} | {k: g.value for k, g in parsed.given.items()}
    values["api_key"] = values["api_key"] or os.environ.get(KEY, "")
    problems = [*parsed.problems, *engine_problems(values), *_problems(values)]
    world = from_environment()
    config = model_config(parsed, problems, None if world is None else world.size)
    if problems:
        raise Refused(problems)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    processes = 1 if world is not None else config.layout.world
    return run_local("isotron.serve.main:main", processes, (config, {n: values[n] for n in options}))


def _problems(values: dict[str, Any]) -> list[Problem]:
    open_to_all = values["host"] not in LOOPBACK and not values["api_key"]
    rules = (
        (f"--host {values['host']} without an API key", not open_to_all,
         "whoever reaches this address could use the model", f"{KEY}=... in the environment, or --host 127.0.0.1"),
        (f"--port {values['port']}", 0 <= values["port"] < 65536, "ports are 0 to 65535", "--port 8000"),
        *((f"--{n.replace('_', '-')} {values[n]}", values[n] >= 1, f"{n} must be 1 or more",
           f"--{n.replace('_', '-')} {OWN[n].default}")
          for n in ("max_new_tokens", "max_answers", "max_body_bytes", "grace")),
        *((f"--{n.replace('_', '-')} {values[n]}", values[n] >= 0, f"{n} must be 0 or more",
           f"--{n.replace('_', '-')} {OWN[n].default}") for n in ("max_waiting", "cache_tokens")),
    )  # fmt: skip
    return [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]


def help_text() -> str:
    """The options of serve."""
    groups = {
        "[server]": [*OWN.values(), *JSON.values()],
        "[engine]": ENGINE.values(),
        "[run]": SHARED.values(),
        "[tokenizer]": TOKENIZER.values(),
    }
    return options_help("isotron serve --load DIR [--port 8000]", groups)
