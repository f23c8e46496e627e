"""Every option of a run, read from the config dataclasses: its flag, type, default, help and legal values. PURE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from isotron.config.schema import MODELS, SECTIONS

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "ints": "whole numbers such as 2,3,2",
    "floats": "numbers such as 1.0,1.5",
    "strs": "one or more words",
}
_PARSERS: dict[str, Callable[[str], float]] = {"int": int, "float": float}
_KIND_OF_TYPE = {
    int: "int",
    float: "float",
    str: "str",
    bool: "bool",
    tuple[int, ...]: "ints",
    tuple[float, ...]: "floats",
    tuple[str, ...]: "strs",
}


@dataclass(frozen=True)
class Option:
    """One option: a leaf of a config section, or (section "") one that only a command has.

    `families` names the model families that have the field; empty means all of them.
    """

    name: str
    kind: str
    default: Any = ""
    help: str = ""
    section: str = ""
    choices: tuple[Any, ...] | None = None
    unit: str = ""
    families: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The option as typed: --hidden-size."""
        return "--" + self.name.replace("_", "-")


@cache
def catalogue() -> dict[str, Option]:
    """Leaf name -> option, over all sections; leaf names are unique, except that model families share theirs."""
    found: dict[str, Option] = {}
    for section, default in SECTIONS.items():
        classes = MODELS if section == "model" else {"": type(default)}
        for family, cls in classes.items():
            for option in _options(section, cls, (family,) if family else ()):
                found[option.name] = _merge(found.get(option.name), option)
    shared = tuple(MODELS)
    return {n: o if o.families != shared else _with_families(o, ()) for n, o in found.items()}


def _options(section: str, cls: type, families: tuple[str, ...]) -> list[Option]:
    types = get_type_hints(cls)
    options = []
    for f in fields(cls):
        meta = f.metadata
        kind = _KIND_OF_TYPE[types[f.name]]
        legal = meta["choices"], meta["unit"], families, meta["absent"]
        options.append(Option(f.name, kind, f.default, meta["help"], section, *legal))
    return options


def _merge(old: Option | None, new: Option) -> Option:
    if old is None:
        return new
    if old.section != new.section or old.kind != new.kind:
        raise TypeError(f"option {new.name} is declared twice: in [{old.section}] and in [{new.section}]")
    return _with_families(old, old.families + new.families)


def _with_families(o: Option, families: tuple[str, ...]) -> Option:
    return replace(o, families=families)


def parse_words(option: Option, words: list[str]) -> Any:
    """The value that command-line words stand for; raises ValueError with the reason when they stand for none."""
    if option.kind == "strs":
        return tuple(words)
    if option.kind in ("ints", "floats"):
        number: Callable[[str], float] = int if option.kind == "ints" else _as_typed
        return tuple(_number(number, w, option.kind) for word in words for w in word.split(",") if w)
    (word,) = words
    if option.kind == "str":
        return _chosen(option, word)
    if option.kind == "bool":
        if word.lower() not in ("true", "false"):
            raise ValueError(f"{word!r} is not true or false")
        return word.lower() == "true"
    return _chosen(option, _number(_PARSERS[option.kind], word, option.kind))


def check_value(option: Option, value: Any) -> Any:
    """The value of a TOML or JSON entry in the option's type; raises ValueError when the type or choice is wrong."""
    kind = option.kind
    if kind in ("ints", "floats", "strs"):
        items: dict[str, tuple[type, ...]] = {"ints": (int,), "floats": (int, float), "strs": (str,)}
        item = items[kind]
        values = [value] if isinstance(value, item) else value
        if not isinstance(values, (list, tuple)) or any(isinstance(v, bool) or not isinstance(v, item) for v in values):
            raise ValueError(f"{value!r} is not {KINDS[kind]}")
        return tuple(values)
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wanted = {"int": int, "float": float, "str": str, "bool": bool}[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{value!r} is not {KINDS[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return _chosen(option, value)


def _as_typed(word: str) -> float:
    """A number of a list that may be whole: 6 of 6,1.5."""
    return int(word) if word.isdecimal() else float(word)


def _number(kind: Callable[[str], float], word: str, name: str) -> Any:
    try:
        value = kind(word)
    except ValueError:
        raise ValueError(f"{word!r} is not {KINDS[name]}") from None
    if not math.isfinite(value):
        raise ValueError(f"{word!r} is not a finite number")
    return value


def _chosen(option: Option, value: Any) -> Any:
    if option.choices is not None and value not in option.choices:
        why = option.absent.get(str(value).lower(), "")
        raise ValueError((f"{why}; " if why else "") + f"{value!r} is not one of {', '.join(map(str, option.choices))}")
    return value
