"""Frequent checkpoints close by: each node keeps the files of its own ranks and copies of those of the node before it.

    DIR/node_00001/step_00000012/   manifest.json, the files of node 1's ranks, and those of node 0's ranks

`DIR` is a directory that a node has for itself, on its disk or in its memory (/dev/shm). Every rank's file lies there
and, sent over the process group, on the next node: the loss of one node's directory loses nothing. Manifest and files
are those of any checkpoint. Nothing is synced to a disk: what a power cut spoils on one node is whole on the other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isotron.core import comm
from isotron.core.checkpoint.disk import free_bytes
from isotron.core.checkpoint.files import write_tensors
from isotron.core.checkpoint.format import MANIFEST, FileEntry, Manifest
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.locate import STEP, step_name
from isotron.core.checkpoint.publish import temporary
from isotron.core.checkpoint.ranks import together
from isotron.core.checkpoint.save import SPARE_BYTES, Saved, Staged, combine, stage
from isotron.core.errors import refuse
from isotron.core.layout import whole
from isotron.core.mesh import Group

RUN = "local_run"  # in meta: of which run these files are
FILES = "files/"  # tensors of bytes: what other checkpoints hold as files
BLOCK_BYTES = 2**24

FileTable = dict[str, list[Any]]  # name -> [bytes, SHA-256]


@dataclass(frozen=True)
class Near:
    """The directories of all nodes, as one rank sees them.

    run: names the run, so that another run's files are never taken. node_ranks: ranks that share a node. group: all
    ranks, over a back end that sends tensors of the host; nothing else uses it at the same time.
    """

    directory: Path
    run: str
    node_ranks: int
    group: Group

    @property
    def ranks(self) -> GroupRanks:
        """The group, as checkpoints see it."""
        return GroupRanks(self.group)

    @property
    def home(self) -> Path:
        """Where this rank's node keeps its steps."""
        return self.directory / f"node_{self.group.index // self.node_ranks:05d}"

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its node."""
        return self.group.index % self.node_ranks == 0

    @property
    def copies(self) -> bool:
        """Whether there is another node of as many ranks for the copies."""
        return self.group.size > self.node_ranks and self.group.size % self.node_ranks == 0

    def save(self, step: int, tensors: Iterable[Saved], meta: Mapping[str, Any]) -> Path:
        """Save a step on all nodes and remove the one before; every rank calls it, all fail together.

        Only when the new step is there on every node does the old one go.
        """
        ranks, asked = self.ranks, f"save step {step} to {self.directory}"
        new = temporary(self.home, step_name(step))

        def plan() -> Staged:
            if self.leads:
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir(parents=True)
            return stage(tensors, ranks.rank)

        staged, plans = together(ranks, asked, plan, lambda s: [s.bytes, s.table()])
        entries, _ = together(ranks, asked, lambda: combine([table for _, table in plans or ()]))
        sizes = ranks.broadcast_json(None if plans is None else [size for size, _ in plans])

        def write() -> dict[str, FileEntry]:
            self._check_room(asked, sizes)
            return {name: write_tensors(new / name, items, sync=False) for name, items in staged.files.items()}

        tables = ranks.broadcast_json(together(ranks, asked, write, _table)[1])
        files = {name: FileEntry(*entry) for table in tables for name, entry in table.items()}
        text = Manifest(step, {**meta, RUN: self.run}, entries, files).dumps().decode() if plans is not None else ""
        text = ranks.broadcast_json(text)
        together(ranks, asked, lambda: self._copy(new, tables) if self.copies else None)
        together(ranks, asked, lambda: _publish(new, text.encode()) if self.leads else None)
        if self.leads:
            self._remove(self.home, lambda other: other != step)
        return new.with_suffix("")

    def forget(self, after: int) -> None:
        """Remove, on this rank's node, what other runs left, and steps that come after the one a run goes on from."""
        if self.leads and self.directory.is_dir():
            for home in self.directory.glob("node_*"):
                self._remove(home, lambda step: step > after)
                for leftover in home.glob("*.tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, home: Path, doomed: Any) -> None:
        for entry in home.iterdir():
            match = STEP.fullmatch(entry.name)
            if match and doomed(int(match[1])):
                (entry / MANIFEST).unlink(missing_ok=True)  # first: a half-removed step is none
                shutil.rmtree(entry, ignore_errors=True)

    def _check_room(self, asked: str, sizes: list[int]) -> None:
        """Refuse what this node's directory cannot take: the files of its ranks and the copies."""
        first, size = self.group.index // self.node_ranks * self.node_ranks, self.group.size
        mine = range(first, min(first + self.node_ranks, size))
        need = sum(sizes[r] + (sizes[r - self.node_ranks] if self.copies else 0) for r in mine) + SPARE_BYTES
        free = free_bytes(self.home)
        if self.leads and need > free:
            case = f"the files of this node and the copies need {need} bytes, {free} are free in {self.home}"
            raise refuse(asked, case, f"free {need - free} bytes there, or another --local-save", exit_code=1)

    def _copy(self, new: Path, tables: list[FileTable]) -> None:
        """Send this rank's files to its partner on the next node, and take those of the partner on the node before."""
        me, size = self.group.index, self.group.size
        to, of = (me + self.node_ranks) % size, (me - self.node_ranks) % size
        sends, receives = list(_blocks(tables[me])), list(_blocks(tables[of]))
        failure: OSError | None = None
        for k in range(max(len(sends), len(receives))):
            out = [(_read(new, *block), self.group.ranks[to]) for block in sends[k : k + 1]]
            into = [(torch.empty(n, dtype=torch.uint8), self.group.ranks[of]) for _, _, n in receives[k : k + 1]]
            for pending in comm.exchange(out, into, self.group):
                pending.wait()
            for block, _ in into if failure is None else ():
                try:
                    with (new / receives[k][0]).open("ab") as f:
                        f.write(block.numpy().data)
                except OSError as error:  # raised below: the others still send and receive
                    failure = error
        if failure is not None:
            raise failure


def as_tensors(files: Mapping[str, bytes | Path], ranks: GroupRanks) -> list[Saved]:
    """Further files of a checkpoint as tensors of bytes, from the first rank."""
    found = []
    for name, content in files.items() if ranks.rank == 0 else ():
        data = np.frombuffer(content if isinstance(content, bytes) else content.read_bytes(), np.uint8)
        shape = (len(data),)
        found.append(Saved(FILES + name, torch.uint8, shape, [(whole(shape), torch.from_numpy(data.copy()))]))
    return found


def _table(written: Mapping[str, FileEntry]) -> FileTable:
    return {name: [f.bytes, f.sha256] for name, f in written.items()}


def _blocks(table: FileTable) -> Iterator[tuple[str, int, int]]:
    """(file, offset, bytes) of what is sent at once."""
    for name, (size, _) in sorted(table.items()):
        for start in range(0, size, BLOCK_BYTES):
            yield name, start, min(BLOCK_BYTES, size - start)


def _read(new: Path, name: str, start: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(new / name, np.uint8, size, offset=start))


def _publish(new: Path, manifest: bytes) -> None:
    step = new.with_suffix("")
    (new / MANIFEST).write_bytes(manifest)
    if step.exists():
        shutil.rmtree(step)
    os.replace(new, step)
