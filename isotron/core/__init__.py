"""The library. `shard` is the front door for modules of one's own; `parallel/model.py` for the models here."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "shard":
        from isotron.core.engine.shard import shard

        return shard
    raise AttributeError(f"module isotron.core has no attribute {name}")
