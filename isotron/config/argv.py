"""Command-line words -> given options, in order, with everything wrong with them. PURE.

Own reader instead of argparse because each value must remember how it was spelled, options have several spellings, the
last occurrence wins, and all problems of a command are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotron.config import compat
from isotron.config.catalogue import Option, catalogue, parse_words
from isotron.config.tables import bad_value, example, nearest
from isotron.core.errors import Problem

_GLUED = re.compile(r"\s+--?[A-Za-z]")


@dataclass(frozen=True)
class Given:
    """One value for one leaf: from which words, and at which place in the command (later wins)."""

    leaf: str
    value: Any
    source: str
    place: int


@dataclass
class Parsed:
    """What a command line gives. `doubtful` are leaves that a problem touches, so that no follow-up is reported."""

    given: dict[str, Given] = field(default_factory=dict)
    repeated: dict[str, list[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)

    def add(self, leaf: str, value: Any, source: str, place: int) -> None:
        """Record a value; the last occurrence wins."""
        self.given[leaf] = Given(leaf, value, source, place)
        self.repeated.setdefault(leaf, []).append(value)


def clean_words(argv: Sequence[str]) -> list[str]:
    r"""Undo what pasting a multi-line command on one line does: `\ --flag` arrives as the single word " --flag"."""
    words = []
    for word in argv:
        if word and not word.strip(" \t\r\n\\"):
            continue
        words.append(word.strip() if _GLUED.match(word) else word)
    return words


def parse(argv: Sequence[str], options: Mapping[str, Option]) -> Parsed:
    """Read a command line (without the verb) into leaves of `options`, in isotron's and in Megatron's spellings."""
    parsed, words = Parsed(), clean_words(argv)
    at = 0
    while at < len(words):
        start, word = at, words[at]
        if not _is_option(word):
            at += 1
            parsed.problems.append(_stray(word, options))
            continue
        flag, glued, tail = word.partition("=")
        values = [tail] if glued else []
        if not glued:
            while at + 1 < len(words) and not _is_option(words[at + 1]):
                at += 1
                values.append(words[at])
        at = start + 1 + _read(parsed, flag, values, bool(glued), start, options) * (not glued)
    return parsed


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _read(parsed: Parsed, flag: str, values: list[str], glued: bool, place: int, options: Mapping[str, Option]) -> int:
    """Take one option and as many of the words after it as belong to it; returns how many those are."""
    leaf, negated = _leaf_of(flag, options)
    if leaf:
        return _read_own(parsed, options[leaf], flag, negated, values, place)
    foreign = compat.find(flag)
    if foreign is not None:
        if glued and foreign.words == 0:
            parsed.problems.append(Problem(f"{flag}={values[0]}", f"{flag} takes no value", flag))
            return 0
        return _read_foreign(parsed, foreign, flag, values, place)
    _unknown(parsed, flag, options)
    return len(values)


def _leaf_of(flag: str, options: Mapping[str, Option]) -> tuple[str, bool]:
    """(leaf, whether --no- was put before it) of a flag in either spelling; ("", False) when it is neither."""
    for text, negated in ((flag, False), ("--" + flag[5:], True)):
        if negated and not flag.startswith("--no-"):
            break
        leaf = compat.ALIASES.get(text) or text[2:].replace("-", "_")
        plain = "_" not in text or text in compat.ALIASES
        if plain and leaf in options and (not negated or options[leaf].kind == "bool"):
            return leaf, negated
    return "", False


def _read_own(parsed: Parsed, option: Option, flag: str, negated: bool, values: list[str], place: int) -> int:
    if option.kind == "bool":
        words = values[:1] if values and values[0].lower() in ("true", "false") else []
        value = (words[0].lower() == "true" if words else True) is not negated
        parsed.add(option.name, value, " ".join([flag, *words]), place)
        return len(words)
    words = values if option.kind in ("ints", "floats", "strs") else values[:1]
    asked = " ".join([flag, *words])
    try:
        if not words:
            raise ValueError("the value is missing")
        own = [compat.VALUE_ALIASES.get((option.name, w), w) for w in words]
        parsed.add(option.name, parse_words(option, own), asked, place)
    except ValueError as error:
        parsed.problems.append(bad_value(asked, error, option, f"{flag} "))
        parsed.doubtful.add(option.name)
    return len(words)


def _read_foreign(parsed: Parsed, foreign: compat.Foreign, flag: str, values: list[str], place: int) -> int:
    words = values if foreign.words < 0 else values[: foreign.words]
    asked = " ".join([flag, *words])
    if len(words) < foreign.words:
        parsed.problems.append(Problem(asked, "the value is missing", f"{flag} with a value, or leave it out"))
        parsed.doubtful.update(foreign.touches)
        return len(words)
    outcome = foreign.read(flag, words)
    if isinstance(outcome, Problem):
        parsed.problems.append(outcome)
        parsed.doubtful.update(foreign.touches)
    elif isinstance(outcome, str):
        parsed.notes.append(f"{asked}: {outcome}")
    else:
        for leaf, value in outcome.items():
            parsed.add(leaf, value, asked, place)
    return len(words)


def _unknown(parsed: Parsed, flag: str, options: Mapping[str, Option]) -> None:
    other, _ = _leaf_of(flag, catalogue())
    if other:
        case = "it is an option of isotron train, not of this command"
        fix = "leave it out" + "; what a checkpoint fixes is read from it" * ("load" in options)
        parsed.problems.append(Problem(flag, case, fix))
        return
    known = {o.flag for o in options.values()} | {f for f, leaf in compat.ALIASES.items() if leaf in options}
    close = nearest(flag.replace("_", "-"), known | compat.names())
    for name in close.split(" or "):
        parsed.doubtful.add(compat.ALIASES.get(name, name[2:].replace("-", "_")))
    parsed.problems.append(Problem(flag, "there is no such option", close or "isotron VERB --help for all options"))


def _stray(word: str, options: Mapping[str, Option]) -> Problem:
    if word.startswith("-") and len(word) > 1:
        return Problem(
            word, "options begin with two dashes", nearest("-" + word, (o.flag for o in options.values())) or "--help"
        )
    fix = (
        f"--config {word}"
        if "config" in options and word.endswith(".toml")
        else "leave it out, or put an option before it"
    )
    return Problem(word, "it follows no option that takes it", fix)


def usage(option: Option) -> str:
    """An option with a sample of its value: --tp 1."""
    return option.flag if option.kind == "bool" else f"{option.flag} {example(option)}"
