"""Config tables in TOML or JSON form, read with every name and type checked. PURE."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from isotron.config.catalogue import Option, catalogue, check_value
from isotron.config.schema import MODELS, PRESETS, SECTIONS
from isotron.core.errors import Problem, refuse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHOOSERS = {
    "family": Option("family", "str", "", "model family; the default is llama", "model", tuple(MODELS)),
    "preset": Option("preset", "str", "", "model sizes by name; later values override them", "model", tuple(PRESETS)),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Up to three known names close to a mistyped one, as text; empty when nothing is close."""
    return " or ".join(difflib.get_close_matches(name, sorted(known), 3, 0.6))


def read_tables(tree: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str, list[Problem]]:
    """Leaves of {section: {leaf: value}}, the model family it names ("" if none), and everything wrong with it."""
    leaves: dict[str, Any] = {}
    problems: list[Problem] = []
    for section, table in tree.items():
        if section not in SECTIONS or not isinstance(table, Mapping):
            problems.append(_unknown_section(section, where))
            continue
        for leaf, raw in table.items():
            option = CHOOSERS.get(leaf) if section == "model" and leaf in CHOOSERS else catalogue().get(leaf)
            if option is None or option.section != section:
                problems.append(_unknown_leaf(section, leaf, option, where))
                continue
            try:
                leaves[leaf] = check_value(option, raw)
            except ValueError as error:
                problems.append(bad_value(f"{where}: {section}.{leaf} = {raw!r}", error, option, f"{leaf} = "))
    family = leaves.get("family", "")
    return leaves, family, problems


def read_toml(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Leaves of a TOML file and everything wrong with them; refused where there is no such file, or no TOML in it."""
    try:
        with open(path, "rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError as error:
        raise refuse(f"--config {path}", "there is no such file", "--config with the path of a TOML file") from error
    except IsADirectoryError as error:
        fix = f"--config with a file, such as {path.rstrip('/')}/run.toml"
        raise refuse(f"--config {path}", "it is a directory", fix) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        example = "tables of the form\n        [layout]\n        tp = 2"
        raise refuse(f"--config {path}", f"it cannot be read as TOML: {error}", example) from error
    leaves, _, problems = read_tables(tree, path)
    return leaves, problems


def bad_value(asked: str, error: ValueError, option: Option, prefix: str) -> Problem:
    """The problem of a value with the wrong type or choice; its fix is a legal value."""
    return Problem(asked, f"{error} ({option.name}: {option.help})", f"{prefix}{example(option)}")


def example(option: Option) -> str:
    """A legal value of an option, for messages."""
    if option.choices:
        return str(next((c for c in option.choices if c == option.default), option.choices[0]))
    samples = {"int": "1", "float": "0.1", "bool": "true", "str": "NAME", "strs": "NAME"}
    samples |= {"ints": "2,2", "floats": "1.0,1.5"}
    default = option.default
    return (
        str(default)
        if isinstance(default, (int, float)) and default and option.kind != "bool"
        else samples[option.kind]
    )


def _unknown_section(section: str, where: str) -> Problem:
    close = nearest(section, SECTIONS)
    return Problem(f"{where}: [{section}]", f"the sections are {', '.join(SECTIONS)}", f"[{close or 'model'}]")


def _unknown_leaf(section: str, leaf: str, option: Option | None, where: str) -> Problem:
    asked = f"{where}: {section}.{leaf}"
    if option is not None:
        return Problem(asked, f"{leaf} belongs to section [{option.section}]", f"{option.section}.{leaf}")
    known = [n for n, o in catalogue().items() if o.section == section]
    close = nearest(leaf, known) or nearest(leaf, catalogue())
    return Problem(asked, f"[{section}] has no such entry", close or f"one of {', '.join(known)}")
