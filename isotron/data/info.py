"""`PREFIX.info.json` beside a .bin/.idx pair: what made it, so that a wrong tokenizer is told before training. PURE.

The note is optional (files of Megatron have none) and never needed to read the tokens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def info_path(prefix: str | Path) -> Path:
    """PREFIX.info.json"""
    return Path(f"{prefix}.info.json")


def write_info(prefix: str | Path, info: dict[str, Any]) -> None:
    """Write the note beside the pair, through a temporary file."""
    temporary = Path(f"{info_path(prefix)}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(info, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(info_path(prefix))


def read_info(prefix: str | Path) -> dict[str, Any] | None:
    """The note, or None where there is none or it is not readable as one."""
    path = info_path(prefix)
    if not path.is_file():
        return None
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # a note is a convenience: the pair itself is checked when it is opened
        return None
    return info if isinstance(info, dict) else None
