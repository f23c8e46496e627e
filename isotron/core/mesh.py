"""Ranks -> coordinates and process groups.

A mesh names the axes of the world; the first axis varies fastest, which keeps tensor-parallel ranks inside one machine.
The ranks of a pipeline stage have two views: the dense one (tp, cp, dp) of everything that all tokens pass, and the
expert one (etp, ep, edp) of experts, folded anew from the same ranks.
Groups are values handed to whoever needs them; there is no registry. A group of one rank has no process group behind it
and every collective over it is the identity, so code never asks whether an axis is in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from isotron.core.shared_memory import MOST_RANKS, Line, meet

AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
UNKNOWN_SECONDS = 600.0  # that a message in memory may take where a group does not say


@dataclass(frozen=True)
class Group:
    """Some ranks in order, this rank's place among them, and the process group that joins them (None for one rank).

    `line`: where they meet in memory, when they are processes without GPUs on one machine.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None
    line: Line | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


ALONE = Group((0,), 0)


def coordinate_of(rank: int, sizes: Mapping[str, int], axes: Sequence[str] = AXES) -> dict[str, int]:
    """Mesh coordinate of a rank in one of the views."""
    where = {}
    for axis in axes:
        rank, where[axis] = divmod(rank, sizes[axis])
    return where


def rank_of(coordinate: Mapping[str, int], sizes: Mapping[str, int], axes: Sequence[str] = AXES) -> int:
    """Rank at a mesh coordinate of one of the views."""
    rank = 0
    for axis in reversed(axes):
        rank = rank * sizes[axis] + coordinate[axis]
    return rank


def folded(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of all axes of both views; `edp` is what `etp` (as many as tp unless given) and `ep` leave of a stage."""
    dense = {axis: sizes.get(axis, 1) for axis in AXES}
    etp, ep = sizes.get("etp", dense["tp"]), sizes.get("ep", 1)
    edp, rest = divmod(dense["tp"] * dense["cp"] * dense["dp"], etp * ep)
    if rest or not edp:
        raise ValueError(f"{dense['tp']} x {dense['cp']} x {dense['dp']} ranks cannot be folded into {etp} x {ep} x n")
    return {**dense, "etp": etp, "ep": ep, "edp": edp}


class Mesh:
    """The world as a grid, seen from one rank.

    `sizes` and `coordinate` map axis -> size and axis -> index, of both views. Every rank must ask for the same groups
    in the same order; only the members of a group take part in making it.
    """

    def __init__(self, rank: int = 0, **sizes: int) -> None:
        self.sizes = folded(sizes)
        self.rank = rank
        self.size = prod(self.sizes[axis] for axis in AXES)
        self.coordinate = coordinate_of(rank, self.sizes) | coordinate_of(rank, self.sizes, EXPERT_AXES)
        self._made: dict[tuple[int, ...], Group] = {}
        self._passed: set[tuple[int, ...]] = set()
        self.axes: dict[tuple[str, ...], Group] = {}
        for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("cp", "dp"), AXES, ("etp", "ep"), ("edp",)):
            self.axes[axes] = self.group_of(self.ranks_along(*axes))

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from this one only along `axes` (of one view), first axis fastest."""
        view = _view(axes)
        ordered = [a for a in view if a in axes]
        steps = product(*(range(self.sizes[a]) for a in reversed(ordered)))
        move = (dict(zip(reversed(ordered), step, strict=True)) for step in steps)
        return tuple(rank_of({**self.coordinate, **m}, self.sizes, view) for m in move)

    def group(self, *axes: str) -> Group:
        """The group along some axes; `group("tp")`, `group("cp", "dp")`, `group(*AXES)` for the world; `group("edp")`,
        `group("etp", "ep")` for experts.
        """
        return self.axes[tuple(a for a in _view(axes) if a in axes)]

    def apart(self) -> Group:
        """All ranks once more, over the CPU's back end: for a thread that communicates beside the main one."""
        handle = _new_group(None, backend="gloo") if self.size > 1 else None
        return joined(tuple(range(self.size)), self.rank, handle)

    def subgroup(self, axis: str, replicas: int) -> Group:
        """Neighbours of this rank along `axis` in blocks of `replicas`."""
        along = self.ranks_along(axis)
        start = self.coordinate[axis] // replicas * replicas
        return self.group_of(along[start : start + replicas])

    def places(self, axis: str, indices: Iterable[int]) -> Group | None:
        """The ranks at some places along an axis; None on the ranks at the others. All ranks of the axis call it.

        torch names a group by its ranks and by how many groups the process has, so whoever is not in it makes another.
        """
        along = self.ranks_along(axis)
        ranks = tuple(along[i] for i in sorted(set(indices)))
        if self.rank in ranks:
            return self.group_of(ranks)
        if 1 < len(ranks) < len(along) and ranks not in self._passed:
            self._passed.add(ranks)
            _new_group([self.rank], use_local_synchronization=True)
        return None

    def group_of(self, ranks: Iterable[int]) -> Group:
        """The group of exactly these ranks (this one among them), ascending: torch sorts those of its groups, and what
        is gathered would come in another order than the members stand in here.
        """
        ranks = tuple(ranks)
        if list(ranks) != sorted(set(ranks)):
            raise ValueError(f"the ranks of a group ascend: {ranks}")
        if ranks not in self._made:
            self._made[ranks] = joined(ranks, ranks.index(self.rank), self._connect(ranks))
        return self._made[ranks]

    def _connect(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if len(ranks) == self.size:
            return dist.group.WORLD
        return _new_group(list(ranks), use_local_synchronization=True)


def _new_group(ranks: list[int] | None, **how: Any) -> dist.ProcessGroup:
    """Ranks in a group of their own. What its messages may take is as long as in the default group: torch would take
    its own default, 10 minutes on GPUs and 30 elsewhere.
    """
    made: dist.ProcessGroup = dist.new_group(ranks, timeout=_timeout(dist.group.WORLD), **how)
    return made


def joined(ranks: tuple[int, ...], index: int, handle: dist.ProcessGroup | None) -> Group:
    """A group whose members meet in memory where they can. They all call it: nothing may wait for others later on."""
    line = None
    if handle is not None and len(ranks) <= MOST_RANKS and dist.get_backend(handle) == "gloo":
        given = _timeout(handle)
        seconds = UNKNOWN_SECONDS if given is None else given.total_seconds()
        line = meet(index, len(ranks), partial(_exchange, handle, len(ranks)), seconds)
    return Group(ranks, index, handle, line)


def _exchange(handle: dist.ProcessGroup, size: int, card: bytes) -> list[bytes]:
    """Everybody's card, in rank order."""
    own = torch.frombuffer(bytearray(card), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own, handle)
    return [bytes(other.tolist()) for other in every]


def _timeout(handle: Any) -> timedelta | None:
    """How long a message of the group may take; None where its back ends do not agree. What holds it is private to
    torch.
    """
    back_ends = [handle._get_backend(device) for device in getattr(handle, "_device_types", ())]
    found = {getattr(getattr(back_end, "options", None), "_timeout", None) for back_end in back_ends}
    return found.pop() if len(found) == 1 else None


def _view(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes among which these are."""
    return AXES if set(axes) <= set(AXES) else EXPERT_AXES
