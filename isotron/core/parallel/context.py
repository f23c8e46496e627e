"""Context parallelism: every rank holds some slots of every row. Here rows are cut, the one place, and the attention
layers of a stage get the core that lets their queries meet the keys of other ranks.

| --cp-comm-type | keys and values                                           | needs                               |
|----------------|-----------------------------------------------------------|-------------------------------------|
| p2p            | travel in a ring, one block while another is worked on    | nothing                             |
| allgather      | come all at once                                          | memory for the whole rows' keys     |
| a2a            | heads are dealt to the ranks instead of slots             | query heads that the ranks divide   |
| a2a+p2p        | a2a in small groups of neighbours, a ring over the groups | --hierarchical-cp-sizes             |

Everything else of a layer works token by token and needs nothing. Gradients are summed over cp x dp in `data.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
import torch.nn as nn

from isotron.core.batch import Batch, Part
from isotron.core.mesh import Group, Mesh
from isotron.core.nn.attention import Causal
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mtp import looked_ahead
from isotron.core.parallel.context_heads import Heads
from isotron.core.parallel.context_ring import Ring
from isotron.core.parallel.deal import sizes_of
from isotron.core.parallel.dealt import Varied
from isotron.core.parallel.plan import Layout
from isotron.core.rows import slots, zigzag


def local_batch(batch: Batch, index: int, count: int, depths: int = 0) -> Batch:
    """What rank `index` of `count` holds of a batch of whole rows. `depths`: of predictions further ahead."""
    if count == 1:
        return batch
    batch = looked_ahead(batch, depths)
    runs = tuple(zigzag(i, count, batch.shape[1]) for i in range(count))
    here = torch.tensor(slots(runs[index]), device=batch.tokens.device)
    fields = {
        name: getattr(batch, name).index_select(-1, here)
        for name in ("tokens", "labels", "loss_mask", "positions", "doc_ids", "types", "ahead", "ahead_mask")
        if getattr(batch, name) is not None
    }
    return replace(batch, **fields, part=Part(runs, batch.cuts, batch.positions))


def fill_context(module: Decoder, layout: Layout, mesh: Mesh) -> None:
    """Give the attention layers of a stage the cores of its context parallelism, and dropout its place in the rows."""
    group = mesh.group("cp")
    if layout.hybrid_context_parallel:
        _fill_varied(module, layout, mesh)
        return
    if group.size == 1:
        return
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.context = (group.index, group.size)
    for number, block in _blocks(module):
        kind = layout.cp_type(number)
        for layer in list(block.modules()):
            plain = getattr(layer, "core", None)
            if isinstance(plain, Causal):
                layer.core = context_core(plain, kind, layout, mesh)


def _blocks(module: Decoder) -> list[tuple[int, nn.Module]]:
    """The blocks of a stage by their numbers; those further ahead are like the last one, -1."""
    ahead = [module.mtp] if "mtp" in module.ends else []
    return [*((int(number), block) for number, block in module.layers.items()), *((-1, block) for block in ahead)]


def _fill_varied(module: Decoder, layout: Layout, mesh: Mesh) -> None:
    """Cores for groups of every size; these are neighbours among the ranks that hold the same weights."""
    along, index = mesh.ranks_along("cp", "dp"), mesh.group("cp", "dp").index
    starts = ((size, index // size * size) for size in sizes_of(len(along)) if size > 1)
    groups = [mesh.group_of(along[start : start + size]) for size, start in starts]
    cp = mesh.group("cp")  # of whole rows, where its size is none of these
    groups += [cp] if cp.size > 1 and all(cp.size != g.size for g in groups) else []
    for number, block in _blocks(module):
        for layer in list(block.modules()):
            plain = getattr(layer, "core", None)
            if isinstance(plain, Causal):
                kind, tp = layout.cp_type(number), mesh.group("tp")
                # where heads are dealt each size has a copy, which drops the probabilities of its own heads
                own = {g.size: deepcopy(plain) if kind == "a2a" else plain for g in groups}
                layer.core = Varied(plain, {g.size: _among(own[g.size], kind, g, tp) for g in groups})


def _among(plain: Causal, kind: str, group: Group, tp: Group) -> nn.Module:
    """The core of a layer of a type with one level, among the ranks of a group."""
    ranks = range(group.size)
    if kind in ("p2p", "allgather"):
        return Ring(plain, group, [[i] for i in ranks], gather=kind == "allgather")
    _deal_heads(plain, group, tp)
    return Heads(plain, group, ranks)


def _deal_heads(plain: Causal, among: Group, tp: Group) -> None:
    """Its dropout knows which of all heads are here."""
    plain.dropout.heads = (tp.index * among.size + among.index, tp.size * among.size)


def context_core(plain: Causal, kind: str, layout: Layout, mesh: Mesh) -> nn.Module:
    """The core of a layer of type `kind`."""
    group, tp = mesh.group("cp"), mesh.group("tp")
    if kind != "a2a+p2p":
        return _among(plain, kind, group, tp)
    size = layout.hierarchical_cp_sizes[0]
    inner, outer = groups_of(mesh, size)
    _deal_heads(plain, inner, tp)
    blocks = [list(range(start, start + size)) for start in range(0, group.size, size)]
    members = blocks[group.index // size]
    return Heads(plain, inner, members, Ring(plain, outer, blocks) if outer.size > 1 else None)


def groups_of(mesh: Mesh, size: int) -> tuple[Group, Group]:
    """The neighbours of this rank along cp in blocks of `size`, and its counterparts in the other blocks."""
    inner = mesh.subgroup("cp", size)
    along: Sequence[int] = mesh.ranks_along("cp")
    return inner, mesh.group_of(along[mesh.coordinate["cp"] % size :: size])
