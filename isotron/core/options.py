"""How a field of a config dataclass declares its help text and its legal values.

PURE. The framework builds flags, `--help` and TOML checks from these fields; the core only declares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    unit: str = "",
    absent: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field with its help text, legal values and unit in its metadata.

    `absent`: well-known values that are not there, and why.
    """
    metadata = {"help": help, "choices": choices, "unit": unit, "absent": dict(absent or {})}
    if isinstance(default, (list, dict)):
        raise TypeError("config defaults are immutable: use a tuple")
    return field(default=default, metadata=metadata)
