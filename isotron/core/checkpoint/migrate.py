"""Manifests of older versions brought up to the present one, and the hash that a manifest carries of itself. PURE.

| version | what it added                                                                             |
|---------|-------------------------------------------------------------------------------------------|
| 1       | the first                                                                                 |
| 2       | `manifest_sha256`, the last field: SHA-256 of every byte before it, so that a flipped bit |
|         | in a counter or an offset is found too                                                    |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

VERSION = 2
DIGEST = "manifest_sha256"

Raw = dict[str, Any]


def _from_1(raw: Raw) -> Raw:
    """Version 1 had no hash of its own; everything else is the same."""
    return {**raw, "format_version": 2}


MIGRATIONS: Mapping[int, Callable[[Raw], Raw]] = {1: _from_1}


def migrated(raw: Raw, version: int) -> Raw:
    """The manifest as the present version would have written it, step by step from its own version."""
    while version < VERSION:
        raw = MIGRATIONS[version](raw)
        version = int(raw["format_version"])
    return raw


def sealed(text: str) -> bytes:
    """A manifest without its closing brace, ended with its own hash."""
    data = f"{text},\n".encode()
    return data + f'"{DIGEST}": "{hashlib.sha256(data).hexdigest()}"}}\n'.encode()


def seal_error(data: bytes) -> str | None:
    """Why the bytes are not what their own hash says, or None."""
    head, found, tail = data.rpartition(f'"{DIGEST}": "'.encode())
    if not found:
        return f"it has no {DIGEST} at its end"
    expected, actual = tail[:64].decode("ascii", "replace"), hashlib.sha256(head).hexdigest()
    if tail != f'{actual}"}}\n'.encode():
        return f"it is damaged: expected SHA-256 {expected}, found {actual}"
    return None
