"""What a checkpoint holds: step, position, layout it was saved in, tensors, bytes, files; whether they are whole."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from isotron.core.checkpoint.format import DTYPES, MANIFEST, Entry, Manifest, read_manifest
from isotron.core.checkpoint.locate import STEP, find, steps, verify_files
from isotron.core.errors import Refused

AXES = ("tp", "pp", "dp", "vpp", "zero", "schedule")
KINDS = ("weights", "master", "exp_avg", "exp_avg_sq")


def is_checkpoint(path: str) -> bool:
    """Whether the path is a step directory, also one that has lost its manifest, or a run with at least one."""
    here = Path(path)
    return here.is_dir() and ((here / MANIFEST).exists() or bool(STEP.fullmatch(here.name)) or bool(steps(here)))


def show_checkpoint(path: str, flags: dict[str, Any]) -> int:
    """Print the report; 1 when files are damaged, else 0. Sizes are always compared, hashes with `verify`."""
    say = (lambda _: None) if flags["json"] else print
    step = Path(path) if (Path(path) / MANIFEST).exists() else find(path, say) or Path(path)
    facts = described(step, read_manifest(step), flags["tensors"])
    damage = _damage(step, flags["verify"])
    facts["verified"], facts["damage"] = bool(flags["verify"]) and not damage, damage
    print(json.dumps(facts) if flags["json"] else "\n".join(_lines(facts)))
    return int(bool(damage))


def described(step: Path, manifest: Manifest, with_tensors: bool = True) -> dict[str, Any]:
    """Everything that is shown, as plain JSON values."""
    config = manifest.meta.get("config")
    layout = config.get("layout", {}) if isinstance(config, dict) else {}
    counters = ("updates", "consumed_samples", "skipped", "weights_only")
    facts: dict[str, Any] = {
        "path": str(step),
        "step": manifest.step,
        "counters": {name: manifest.meta[name] for name in counters if name in manifest.meta},
        "family": config.get("model", {}).get("family") if isinstance(config, dict) else None,
        "layout": {axis: layout[axis] for axis in AXES if axis in layout},
        "kinds": _kinds(manifest),
        "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(manifest.files.items())},
    }
    if with_tensors:
        facts["tensors"] = {
            name: {"dtype": e.dtype, "shape": list(e.shape), "bytes": _bytes(e), "chunks": len(e.chunks)}
            for name, e in sorted(manifest.tensors.items())
        }
    return facts


def _bytes(entry: Entry) -> int:
    return prod(entry.shape) * DTYPES[entry.dtype][1]


def _kinds(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes of the weights and of each kind of optimizer state."""
    found: dict[str, dict[str, int]] = {}
    for name, entry in manifest.tensors.items():
        kind = name.split("/", 1)[0] if "/" in name else KINDS[0]
        row = found.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += prod(entry.shape)
        row["bytes"] += _bytes(entry)
    return dict(sorted(found.items(), key=lambda item: KINDS.index(item[0]) if item[0] in KINDS else len(KINDS)))


def _damage(step: Path, hashes: bool) -> list[str]:
    try:
        verify_files(step, hashes)
    except Refused as refused:
        return [problem.case for problem in refused.problems]
    return []


def _lines(facts: dict[str, Any]) -> list[str]:
    counters = ", ".join(f"{name} {value}" for name, value in facts["counters"].items())
    lines = [f"{facts['path']}: step {facts['step']}" + (f" ({counters})" if counters else "")]
    if facts["family"]:
        axes = ", ".join(f"{axis} {value}" for axis, value in facts["layout"].items())
        lines.append(f"family {facts['family']}, saved at {axes}; it loads at any other layout")
    lines += [f"{'':<12}{'tensors':>9}{'elements':>16}{'bytes':>18}"]
    lines += [f"{k:<12}{r['tensors']:>9}{r['elements']:>16,}{r['bytes']:>18,}" for k, r in facts["kinds"].items()]
    lines += [f"{name}  {f['bytes']:,} bytes  sha256 {f['sha256']}" for name, f in facts["files"].items()]
    for name, t in facts.get("tensors", {}).items():
        lines.append(f"  {name}  {t['dtype']} {t['shape']}  {t['bytes']:,} bytes in {t['chunks']} chunk(s)")
    whole = "every file is whole" if facts["verified"] else "every file has its size; --verify compares all bytes"
    return lines + (facts["damage"] or [whole])
