"""A process group as checkpoints see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isotron.core import comm
from isotron.core.mesh import Group


@dataclass(frozen=True)
class GroupRanks:
    """`Ranks` over a process group."""

    group: Group

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.group.index

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def gather_json(self, obj: Any) -> list[Any] | None:
        """On rank 0 the objects of all ranks."""
        return comm.gather_json(obj, self.group)

    def broadcast_json(self, obj: Any) -> Any:
        """The object of rank 0."""
        return comm.broadcast_json(obj, self.group)

    def barrier(self) -> None:
        """Wait for every rank."""
        comm.barrier(self.group)
