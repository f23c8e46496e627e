"""`isotron inspect PATH`: what a checkpoint or a data set is, read without a model or torch.

`KINDS` says which reader a path belongs to; the first that recognises it shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.inspect_checkpoint import is_checkpoint, show_checkpoint
from isotron.commands.inspect_data import SAMPLES, TOKENIZER, is_data, show_data
from isotron.commands.run_options import JSON
from isotron.config.argv import clean_words, parse
from isotron.config.catalogue import Option
from isotron.core.errors import Refused, refuse

OWN = {
    "verify": Option(
        "verify", "bool", False, "also read every byte and compare its hash; exit code 1 when one differs"
    ),
    "tensors": Option("tensors", "bool", True, "list every tensor; --no-tensors gives the sums alone"),
    **SAMPLES,
    **JSON,
}


@dataclass(frozen=True)
class Kind:
    """What can be inspected: whether a path is one, and the report of it, with the options; it returns an exit code."""

    name: str
    recognises: Callable[[str], bool]
    show: Callable[[str, dict[str, Any]], int]


KINDS: tuple[Kind, ...] = (
    Kind("a checkpoint or a run that has saved", is_checkpoint, show_checkpoint),
    Kind("the prefix of a .bin/.idx pair or a directory of them", is_data, show_data),
)


def run(words: Sequence[str]) -> int:
    """Inspect the paths that the words name; returns the largest exit code."""
    words = clean_words(words)
    paths = list(takewhile(lambda word: not word.startswith("--"), words))
    options = OWN | TOKENIZER
    parsed = parse(words[len(paths) :], options)
    if parsed.problems:
        raise Refused(parsed.problems)
    if not paths:
        raise refuse("isotron inspect without a path", "it shows what a path holds", "isotron inspect runs/first")
    flags = {name: option.default for name, option in options.items()} | {k: g.value for k, g in parsed.given.items()}
    return max(_show(path, flags) for path in paths)


def _show(path: str, flags: dict[str, Any]) -> int:
    for kind in KINDS:
        if kind.recognises(path):
            return kind.show(path, flags)
    known = " or ".join(kind.name for kind in KINDS)
    raise refuse(f"isotron inspect {path}", f"this is not {known}", "isotron inspect runs/first/step_00000010")


def help_text() -> str:
    """The options of inspect."""
    return options_help(
        "isotron inspect PATH [PATH ..] [--OPTION]", {"[command]": OWN.values(), "[tokenizer]": TOKENIZER.values()}
    )
