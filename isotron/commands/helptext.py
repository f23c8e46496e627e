"""`isotron VERB --help`: options by section, each with its default and its legal values. PURE."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from isotron.config import compat
from isotron.config.catalogue import Option
from isotron.config.schema import MODELS
from isotron.config.tables import CHOOSERS

_WORDS = {"int": "N", "float": "X", "str": "TEXT", "bool": "", "ints": "N,N,..", "floats": "X,X,..", "strs": "TEXT .."}
MANY = 6  # choices; more of them follow the help text instead of the option


def options_help(usage: str, groups: Mapping[str, Iterable[Option]], closing: str = "") -> str:
    """The page of a verb: `groups` are headings with their options."""
    lines = [usage, ""]
    for heading, group in groups.items():
        lines += [heading, *(line for option in group for line in _lines(option)), ""]
    return "\n".join(lines + ([closing] if closing else []))


def _lines(option: Option) -> list[str]:
    spelled = [option.flag, *(f for f, leaf in compat.ALIASES.items() if leaf == option.name and "_" not in f)]
    head = f"  {', '.join(spelled)} {_values(option)}".rstrip()
    text = option.help + _default(option)
    if option.choices and len(option.choices) > MANY:
        text += f"; one of {', '.join(map(str, option.choices))}"
    if option.families:
        text += f" [{_having(option.families)}]"
    body = textwrap.wrap(text, 84, initial_indent=" " * 34, subsequent_indent=" " * 34, break_on_hyphens=False)
    if len(head) < 33 and body:
        return [f"{head:<34}{body[0].strip()}", *body[1:]]
    return [head, *body]


def _having(families: tuple[str, ...]) -> str:
    """The families that have an option, or the few that lack it."""
    lacking = [name for name in MODELS if name not in families]
    return f"not {', '.join(lacking)}" if len(lacking) <= 2 else f"{', '.join(families)} only"


def _values(option: Option) -> str:
    if option.choices and len(option.choices) <= MANY:
        return "{" + ",".join(map(str, option.choices)) + "}"
    return _WORDS[option.kind]


def _default(option: Option) -> str:
    default: Any = option.default
    if option.section == "model" and not option.families and option.name not in CHOOSERS:
        by_family = {name: cls.__dataclass_fields__[option.name].default for name, cls in MODELS.items()}
        values = list(by_family.values())
        usual = max(values, key=values.count)
        others = [f"{name} {str(value).lower()}" for name, value in by_family.items() if value != usual]
        if others:
            return f" (default: {', '.join(others)}, others {str(usual).lower()})"
    if option.kind == "bool":
        return f" (default: {'on; --no-' + option.flag[2:] + ' turns it off' if default else 'off'})"
    if default in ("", ()):
        return ""
    if isinstance(default, tuple):
        return f" (default: {' '.join(map(str, default))})"
    return f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
