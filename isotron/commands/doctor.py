"""`isotron doctor`: what this machine has and can do."""

from __future__ import annotations

from collections.abc import Sequence

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import parse
from isotron.core.errors import Refused


def run(words: Sequence[str]) -> int:
    """Look at the machine and print the report; returns the exit code."""
    parsed = parse(words, JSON)
    if parsed.problems:
        raise Refused(parsed.problems)
    from isotron.train import doctor

    result = doctor.run("json" in parsed.given and bool(parsed.given["json"].value))
    return result if isinstance(result, int) else 0


def help_text() -> str:
    """The options of doctor."""
    return options_help("isotron doctor [--json]", {"[command]": JSON.values()})
