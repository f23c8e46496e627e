"""Devices: memory, rates and links, from a data file. PURE."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse
from isotron.core.peaks import peak_flops

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 1 << 30
ALIASES = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "h100-80": "h100", "h100-80gb": "h100"}


@dataclass(frozen=True)
class Hardware:
    """One kind of device in its usual system. Rates per second, one way; memory in bytes."""

    name: str
    memory: float
    bandwidth: float
    node: int
    inner: float
    outer: float
    context: float
    year: int
    peaks: Mapping[str, float] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s; a type that the device has no unit for runs at the rate of the next wider one it has."""
        for wider in (dtype, "bfloat16", "float16", "float32"):
            if wider in self.peaks:
                return self.peaks[wider]
        raise refuse(f"--gpu {self.name}", f"no rate is known for {dtype}", "--gpu h100")

    def link(self, size: int, stride: int) -> float:
        """Bytes/s that each of `size` ranks, `stride` apart, can send around: inner links, or shared outer ones."""
        if size * stride <= self.node:
            return self.inner
        # several members on a node share its ports: a ring goes through each node once
        return min(self.inner, self.outer * max(1, self.node // stride))


@cache
def known() -> dict[str, Hardware]:
    """Every device of the data file by name."""
    text = files("isotron.planner").joinpath("data/hardware.toml").read_text(encoding="utf-8")
    return {name: _device(name, row) for name, row in tomllib.loads(text).items()}


def read(path: str) -> Hardware:
    """A device from a file like the data file, with one table: what `--calibrate` writes."""
    try:
        rows = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        name, row = next(iter(rows.items()))
        return _device(name, row)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        what = f"{path} describes no device: {type(error).__name__}, {error}"
        raise refuse(f"--gpu {path}", what, "--gpu h100, or the file that `isotron plan --calibrate` writes") from error


def _device(name: str, row: Mapping[str, Any]) -> Hardware:
    types = ("float64", "float32", "bfloat16", "float16", "float8", "float4")
    peaks = {t: p for t in types for p in [peak_flops(row["board"], t)] if p}
    if "peak" in row:
        peaks = {"float32": row["peak"] * 1e12}
        if "peak_bfloat16" in row:
            peaks["bfloat16"] = row["peak_bfloat16"] * 1e12
    return Hardware(
        name,
        row["memory"] * GIB,
        row["bandwidth"] * 1e12,
        row["node"],
        row["inner"] * 1e9,
        row["outer"] * 1e9,
        row["context"] * GIB,
        row["year"],
        peaks,
    )


def find(name: str) -> Hardware:
    """A device by name or by the path of a file; refuses a name that is neither."""
    lower = ALIASES.get(name.lower(), name.lower())
    if lower in known():
        return known()[lower]
    if name.endswith(".toml") and Path(name).is_file():
        return read(name)
    near = get_close_matches(lower, known(), n=1) or ["h100"]
    case = f"the devices are {', '.join(known())}, or the path of a .toml file"
    raise refuse(f"--gpu {name}", case, f"--gpu {near[0]}")
