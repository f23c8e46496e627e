"""isotron: write the model once, train it on any layout, on any device, and get the same numbers."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`isotron.initialize`, loaded when it is asked for: the command line answers without torch."""
    if name == "initialize":
        from isotron.core.engine.initialize import initialize

        return initialize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
