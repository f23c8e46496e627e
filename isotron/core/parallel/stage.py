"""Building a pipeline stage: plain modules of global shape, then this rank's part of every parameter.

A model is first made on the meta device at its global sizes. The layout table then says what this rank holds of each
parameter; that much is allocated, drawn, and put in its place, and the sockets are filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.layout import Placed, Rule, Table, shard
from isotron.core.mesh import Mesh
from isotron.core.nn.attention import Causal
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.router import Router
from isotron.core.parallel.buckets import partial_rule
from isotron.core.parallel.context import fill_context
from isotron.core.parallel.data import Flat
from isotron.core.parallel.expert import fill_experts
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.tensor import fill_sockets
from isotron.core.random import normal_pieces


@dataclass
class Stage:
    """One pipeline stage as this rank holds it. `buffers`: names of saved tensors without a gradient."""

    number: int
    module: Decoder
    flat: Flat
    placed: dict[str, Placed]
    hidden_size: int
    sequence_split: int
    dtype: torch.dtype
    buffers: dict[str, Rule] = field(default_factory=dict)

    def recompute(self, wanted: bool) -> None:
        """Under full recompute: whether the next forward keeps only the inputs of its recomputed units."""
        self.module.recompute = "full" if wanted else "none"

    def boundary_shapes(self, batch_shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of the tensors between two stages, for a batch of (B, S)."""
        b, s = batch_shape
        return {"hidden": ((b, s // self.sequence_split, self.hidden_size), self.dtype)}


def build_stage(
    cfg: Any,
    number: int,
    layers: range,
    layout: Layout,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    beside: Stage | None = None,
) -> Stage:
    """Stage `number` of `layout.stages`, holding blocks `layers`, with its initial weights.

    `beside`: the first stage, when this is another one on its rank. A tie between the two is then one parameter, which
    the first stage owns.
    """
    padded = layout.padded_vocab(cfg.vocab_size)
    first, last = number == 0, number == layout.stages - 1
    with torch.device("meta"):
        module: Decoder = import_module(f"isotron.core.models.{cfg.family}").build(cfg, layers, first, last, padded)
    table = cfg.layout(padded)
    tied = dict(table.ties)
    owner = module if first else None if beside is None else beside.module
    placed: dict[str, Placed] = {}
    for name, p in list(module.named_parameters()):
        canonical = table.canonical(name)
        if canonical != name and owner is not None:  # both owners live on this rank: one parameter
            _put(module, name, owner.get_parameter(canonical))
            continue
        rule = table.rule(canonical)
        here = Placed(canonical, rule, shard(rule, mesh.coordinate, mesh.sizes), counts=canonical == name)
        _check_shape(name, p, here, padded)
        _put(module, name, nn.Parameter(initial(here, dtype, seed).to(device)))
        placed[name] = here
    buffers = _make_buffers(module, table, torch.promote_types(dtype, torch.float32), device)
    known = placed if beside is None else {**beside.placed, **placed}
    fill_sockets(module, {**placed, **_aliases(known, tied)}, mesh.group("tp"), layout.sequence_parallel)
    fill_context(module, layout, mesh)
    fill_experts(module, layout, mesh)
    _set_policies(module, layout, seed)
    flat = _flatten(module, placed, tied, first, last, layout, mesh)
    sequence_split = layout.tp if layout.sequence_parallel else 1
    return Stage(number, module, flat, placed, cfg.hidden_size, sequence_split, dtype, buffers)


def _make_buffers(module: nn.Module, table: Table, dtype: torch.dtype, device: torch.device) -> dict[str, Rule]:
    """Give every buffer its memory, zeros; the same on all ranks that hold the stage."""
    rules = {name: table.rule(name) for name, _ in module.named_buffers()}
    for name, rule in rules.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.zeros(rule.shape, dtype=dtype, device=device))
    return rules


def initial(placed: Placed, dtype: torch.dtype, seed: int) -> Tensor:
    """This rank's part of a parameter's initial values, on the CPU; padding is zero."""
    rule, out = placed.rule, torch.zeros(placed.shard.shape, dtype=torch.float32)
    if rule.init == "normal":
        normal_pieces(out, placed.shard.pieces, rule.shape, seed, placed.name)
        out.mul_(rule.std)
    elif rule.init == "ones":
        for piece in placed.shard.pieces:
            out[piece.local_box.slices()] = 1
    return out.to(dtype)


def _aliases(placed: dict[str, Placed], tied: dict[str, str]) -> dict[str, Placed]:
    return {alias: placed[name] for alias, name in tied.items() if name in placed}


def _put(module: nn.Module, name: str, p: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, p)


def _check_shape(name: str, p: Tensor, placed: Placed, padded: int) -> None:
    rule: Rule = placed.rule
    parts = () if rule.split is None else rule.split.parts
    grown = sum(q.padded - q.count for q in parts if q.padded is not None)
    want = tuple(n + (grown if rule.split and d == rule.split.dim else 0) for d, n in enumerate(rule.shape))
    if tuple(p.shape) != want:
        raise ValueError(f"parameter {name} has shape {tuple(p.shape)}, its layout table says {want}")


def _set_policies(module: Decoder, layout: Layout, seed: int) -> None:
    module.recompute, module.recompute_layers = layout.recompute, layout.recompute_num_layers
    for layer in module.modules():
        if isinstance(layer, (Dropout, Router)):
            layer.seed = seed
        if isinstance(layer, Causal):
            layer.backend = layout.attention_backend
        if isinstance(layer, PreNormBlock):
            layer.set_recompute(layout.recompute == "selective")


def _flatten(
    module: Decoder,
    placed: dict[str, Placed],
    tied: dict[str, str],
    first: bool,
    last: bool,
    layout: Layout,
    mesh: Mesh,
) -> Flat:
    tie = None
    if tied and (first or (last and any(alias in placed for alias in tied))):
        along, home = mesh.ranks_along("pp"), layout.placement
        ends = dict.fromkeys((along[home[0]], along[home[-1]]))
        tie = (next(iter(tied.values())) if first else next(iter(tied)), mesh.group_of(ends))

    return Flat(
        module,
        placed,
        mesh.group("cp", "dp"),
        layout.shards_optimizer,
        layout.ddp_bucket_size,
        partial_rule(layout.sequence_parallel),
        lambda replicas: mesh.subgroup("tp", replicas),
        tie,
    )
