"""Which pieces of which matrices are on which rank of a group, for update rules that look at whole matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.layout import Box
from isotron.core.mesh import Group
from isotron.core.optim.matrices import Matrix, deal, parts
from isotron.core.parallel.data import View


def dealt(views: Sequence[View], group: Group) -> list[Matrix]:
    """The matrices of a group with their owners; every rank of it calls this and gets the same."""
    own: dict[str, Any] = {}
    for view in views:
        regions = [[b.offset, b.shape] for b in parts(view.placed.rule)]
        entry = own.setdefault(view.placed.name, {"parts": regions, "boxes": []})
        entry["boxes"] += [[box.offset, box.shape] for box, _ in held(view, view.weight)]
    everyone = comm.broadcast_json(comm.gather_json(own, group), group)
    sections = {name: _boxes(entry["parts"]) for rank in everyone for name, entry in rank.items()}
    return deal(sections, [{name: _boxes(entry["boxes"]) for name, entry in rank.items()} for rank in everyone])


def held(view: View, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """What a view holds of its parameter's matrices, each piece inside one of them."""
    regions = parts(view.placed.rule)
    for box, tensor in view.pieces(flat, owned=False):
        for region in regions:
            common = region.overlap(box)
            if common is not None:
                yield common, tensor[common.relative_to(box).slices()]


def sum_in_order(x: Tensor, group: Group) -> Tensor:
    """Sum of a flat tensor over the group, in place. Every element is added up in rank order, wherever it stands, so
    that ranks of other groups with the same numbers (the two owners of a tie) get the same bits.
    """
    if group.size == 1:
        return x
    each = -(-len(x) // group.size)
    cuts = [min(i * each, len(x)) for i in range(group.size + 1)]
    lengths = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    own = slice(cuts[group.index], cuts[group.index + 1])
    received = comm.start_all_to_all(x, lengths, [lengths[group.index]] * group.size, group).wait()
    total = torch.zeros_like(x[own])
    for part in received.view(group.size, -1):
        total.add_(part)
    x[own] = total
    return comm.start_gather_flat(x, cuts, group).wait()


def _boxes(found: list[Any]) -> list[Box]:
    return [Box(tuple(offset), tuple(shape)) for offset, shape in found]
