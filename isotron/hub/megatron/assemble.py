"""Tensors of single layers, whole, from how the two formats of Megatron cut them. PURE.

`torch_dist` stacks a tensor over layers and cuts it into regions; legacy `torch` has one file per tensor- and
pipeline-parallel rank, with layers counted from 0 in each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotron.core.checkpoint.format import DTYPES
from isotron.core.errors import refuse
from isotron.core.layout import Box, Ints
from isotron.hub.megatron.cut import COLUMNS, ROWS, regions, whole_shape
from isotron.hub.megatron.names import canonical
from isotron.hub.megatron.stored import Chunk, Stored

Place = Callable[[str, int], tuple[Path, int]]
_LAYERS = re.compile(r"(.*decoder\.layers)\.((?!\d+\.).+)", re.ASCII)
_LAYER = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)", re.ASCII)
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?", re.ASCII)


def of_layers(name: str, shape: Ints, chunks: Sequence[tuple[str, Chunk]]) -> dict[str, Stored]:
    """A tensor of `torch_dist`: one for each layer where it is stacked over layers."""
    if not chunks:
        return {canonical(name): Stored("none", shape, ())}
    dtype, match = chunks[0][0], _LAYERS.fullmatch(name)
    if match is None:
        return {canonical(name): Stored(dtype, shape, tuple(c for _, c in chunks))}
    layers: dict[int, list[Chunk]] = {i: [] for i in range(shape[0])}
    for _, chunk in chunks:
        inner = Box(chunk.box.offset[1:], chunk.box.shape[1:])
        for i in range(chunk.box.shape[0]):
            start = chunk.start + i * inner.size * DTYPES[dtype][1]
            layers[chunk.box.offset[0] + i].append(Chunk(inner, chunk.file, start))
    return {canonical(f"{match[1]}.{i}.{match[2]}"): Stored(dtype, shape[1:], tuple(c)) for i, c in layers.items()}


def of_ranks(ranks: Sequence[Any], args: Mapping[str, Any], place: Place, where: str) -> dict[str, Stored]:
    """The tensors of legacy files, from those of every rank."""
    files: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for entry in ranks:
        match = _RANK.fullmatch(entry["rank"])
        if match is None:
            raise refuse(where, f"the directory {entry['rank']} belongs to experts", "a dense model, or torch_dist")
        for chunk, model in enumerate(entry["models"]):
            files[chunk, int(match[2] or 0), int(match[1])] = {canonical(k): v for k, v in model.items()}
    tp, found, first = 1 + max((t for _, _, t in files), default=-1), {}, 0
    stages = sorted({(chunk, stage) for chunk, stage, _ in files})
    for chunk, stage in stages:
        parts = [files.get((chunk, stage, t)) for t in range(tp)]
        if None in parts:
            raise refuse(where, f"the file of rank TP {parts.index(None)}, PP {stage} is missing", "a complete copy")
        shards: list[Mapping[str, Any]] = [p for p in parts if p is not None]
        numbers = [int(m[2]) for n in shards[0] for m in [_LAYER.fullmatch(n)] if m]
        for name in shards[0]:
            found[_numbered(name, first)] = _joined(name, [s[name] for s in shards], bool(args.get("swiglu")), place)
        first += 1 + max(numbers, default=-1)
    if not args.get("untie_embeddings_and_output_weights"):
        found.pop("output_layer.weight", None)  # the last stage's copy of the tied embedding
    return found


def layer_of(name: str) -> tuple[int, str] | None:
    """(number of the layer, name without it) of a tensor of a block; None for the others."""
    match = _LAYER.fullmatch(name)
    return None if match is None else (int(match[2]), f"{match[1]}.{match[3]}")


def _numbered(name: str, first: int) -> str:
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}.{int(match[2]) + first}.{match[3]}"


def _joined(name: str, shards: Sequence[Any], gated: bool, place: Place) -> Stored:
    """One tensor from the parts of the tensor-parallel ranks."""
    dtype, tp = shards[0][0], len(shards)
    shape = whole_shape(name, tuple(shards[0][1]), tp)
    chunks = []
    for (_, _, file, start), boxes in zip(shards, regions(name, shape, tp, gated), strict=True):
        path, at = place(file, start)
        for box in boxes:
            chunks.append(Chunk(box, path, at))
            at += box.size * DTYPES[dtype][1]
    if not name.endswith((*ROWS, *COLUMNS)):
        chunks = chunks[:1]  # every rank holds all of it
    return Stored(dtype, shape, tuple(chunks))
