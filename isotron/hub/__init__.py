"""Hugging Face directories in and out: `from_hf`, `to_hf`, `stream`, loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {"from_hf": "isotron.hub.live", "to_hf": "isotron.hub.live", "stream": "isotron.hub.live"}

__all__ = ["from_hf", "stream", "to_hf"]  # noqa: F822  resolved below


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
