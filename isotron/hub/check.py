"""Reading a conversion's result again: every tensor bit by bit, and the table of what became what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.load import Source, TensorSource
from isotron.core.errors import listed, refuse
from isotron.core.layout import Box, whole
from isotron.core.models.hf_names import entry_of
from isotron.hub.families import Spelling
from isotron.hub.megatron.source import MegatronSource
from isotron.hub.opened import Opened
from isotron.hub.reader import HFSource
from isotron.hub.targets import cast_to

SLAB_BYTES = 2**24


@dataclass(frozen=True)
class Line:
    """Tensors of one kind in all layers: names with * for the layer, dtype and shape here, their number and bytes."""

    ours: str
    theirs: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int


def check_result(opened: Opened, work: Path, to: str, dtype: torch.dtype | None) -> None:
    """Compare the result with its source: names, shapes, index (by opening it), then every element."""
    made: Any = {"hf": HFSource, "isotron": Source, "megatron": MegatronSource}[to](work)
    expected, found = set(opened.source.names()), set(made.names())
    wrong = [f"{n} is missing" for n in sorted(expected - found)] + [f"{n} is new" for n in sorted(found - expected)]
    wrong += [n for n in sorted(expected & found) if not _equal(opened.source, made, n, dtype, opened)]
    made.close()
    opened.close()
    if wrong:
        case = f"read again, {len(wrong)} tensors are not what was written: {listed(wrong)}"
        raise refuse(
            f"convert to {work}", case, f"remove {work} and convert again; the disk may be damaged", exit_code=1
        )


def _equal(source: TensorSource, made: Any, name: str, dtype: torch.dtype | None, opened: Opened) -> bool:
    stored, shape = source.info(name)
    kind, shape_made = made.info(name)
    if shape != shape_made or kind != cast_to(name, stored, dtype):
        return False
    width = whole(shape[1:]).size * kind.itemsize
    rows = max(1, SLAB_BYTES // max(1, width))
    for start in range(0, shape[0], rows):
        box = Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))
        pair = [torch.full(box.shape, torch.nan, dtype=kind) for _ in range(2)]
        for reader, out in zip((source, made), pair, strict=True):
            reader.read(name, box, out)
        if not torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8)):
            return False
    opened.close()
    made.close()
    return True


def table(model: Any, source: TensorSource, spelling: Spelling, dtype: torch.dtype | None) -> tuple[Line, ...]:
    """One line per kind of tensor."""
    kinds: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for mapped in spelling.tensors(model):
        stored, shape = source.info(mapped.ours)
        theirs = " | ".join(dict.fromkeys(entry_of(name)[0] for name in mapped.theirs())) + (
            " (transposed)" if mapped.transposed else ""
        )
        key = _starred(mapped.ours), _starred(theirs), dtype_name(dtype or stored), shape
        kinds[key] = kinds.get(key, 0) + 1
    size = {name: getattr(torch, name).itemsize for _, _, name, _ in kinds}
    return tuple(Line(*key, n, n * whole(key[3]).size * size[key[2]]) for key, n in kinds.items())


def _starred(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def as_text(lines: tuple[Line, ...]) -> str:
    """The table in columns."""
    rows = [("isotron", "Hugging Face", "dtype", "shape", "count", "bytes")]
    rows += [(x.ours, x.theirs, x.dtype, " x ".join(map(str, x.shape)), str(x.count), f"{x.bytes:,}") for x in lines]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
