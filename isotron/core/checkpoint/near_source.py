"""Find the newest step that the directories of all nodes hold together, and read it from any layout.

No node needs to see all files. Which copies there are is told to the first rank, which picks the newest step of which
every file is left somewhere; each copy is hashed by one of the ranks that see it, and damaged ones do not count. What a
rank needs of files that it does not see is sent to it, region by region, by one that does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotron.core import comm
from isotron.core.checkpoint.format import MANIFEST, Chunk, Manifest, parse_manifest, read_manifest
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.locate import STEP, file_error, step_name
from isotron.core.checkpoint.near import FILES, RUN, Near
from isotron.core.errors import Refused, listed
from isotron.core.layout import Box

Copies = dict[str, dict[str, list[int]]]  # file -> node directory -> ranks that see it there


@dataclass(frozen=True)
class _Seen:
    """A step in one node's directory: where, its manifest's bytes, and the files that are there in full size."""

    path: Path
    text: bytes
    manifest: Manifest
    files: list[str]

    @property
    def identity(self) -> tuple[int, str]:
        """Step, and the hash of the manifest: parts with the same belong together."""
        return self.manifest.step, hashlib.sha256(self.text).hexdigest()


def find_near(near: Near, newer_than: int, say: Callable[[str], None]) -> NearSource | None:
    """The newest whole step after `newer_than`, as all ranks agree; None without one. Every rank calls it."""
    seen, bare = _look(near, newer_than)
    seen += _adopted(near, seen, bare)
    report = [[*s.identity, s.path.parent.name, s.files, sorted(s.manifest.files)] for s in seen]
    reports = near.ranks.gather_json(report)
    for step, digest, copies in near.ranks.broadcast_json(None if reports is None else _candidates(reports, say)):
        mine = [s for s in seen if s.identity == (step, digest)]
        found = near.ranks.gather_json([_damaged(near, mine, copies), mine[0].text.decode() if mine else ""])
        text, left = near.ranks.broadcast_json(None if found is None else _without(copies, found, say))
        if all(left.values()):
            manifest = parse_manifest(text.encode())
            return NearSource(near, manifest, {s.path.parent.name: s.path for s in mine}, left)
        lost = listed(file for file, where in left.items() if not where)
        say(f"step {step} in {near.directory} is not whole, every copy of {lost} is damaged")
    return None


def _look(near: Near, newer_than: int) -> tuple[list[_Seen], list[Path]]:
    """What this rank sees of this run, and step directories whose manifest cannot be read."""
    found, bare = [], []
    for path in sorted(near.directory.glob("node_*/step_*")):
        match = STEP.fullmatch(path.name)
        if match is None or int(match[1]) <= newer_than:
            continue
        try:
            manifest = read_manifest(path)
            text = (path / MANIFEST).read_bytes()
        except (OSError, Refused):
            bare.append(path)
            continue
        if manifest.meta.get(RUN) == near.run:
            found.append(_Seen(path, text, manifest, _full_size(path, manifest)))
    return found, bare


def _full_size(path: Path, manifest: Manifest) -> list[str]:
    return sorted(n for n, f in manifest.files.items() if file_error(path, n, f, hashed=False) is None)


def _adopted(near: Near, seen: list[_Seen], bare: list[Path]) -> list[_Seen]:
    """Directories without a manifest, by those that other nodes have of the same steps: their files may be whole."""
    asked = near.ranks.gather_json([path.name for path in bare])
    names = near.ranks.broadcast_json(None if asked is None else sorted({name for own in asked for name in own}))
    if not names:
        return []
    texts = near.ranks.gather_json([s.text.decode() for s in seen if s.path.name in names])
    known = near.ranks.broadcast_json(None if texts is None else sorted({text for own in texts for text in own}))
    steps = [(text.encode(), parse_manifest(text.encode())) for text in known]
    return [
        _Seen(path, text, manifest, _full_size(path, manifest))
        for path in bare
        for text, manifest in steps
        if step_name(manifest.step) == path.name
    ]


def _candidates(reports: list[Any], say: Callable[[str], None]) -> list[Any]:
    """[step, manifest's hash, copies] of the steps of which every file is left, newest first."""
    copies: dict[tuple[int, str], Copies] = {}
    for rank, report in enumerate(reports):
        for step, digest, node, files, wanted in report:
            table = copies.setdefault((step, digest), {name: {} for name in wanted})
            for name in files:
                table[name].setdefault(node, []).append(rank)
    for (step, _), table in sorted(copies.items()):
        lost = [name for name, nodes in table.items() if not nodes]
        if lost:
            say(f"step {step} in the nodes' own directories is not whole: no node has {listed(lost)} in full size")
    return [[*key, table] for key, table in sorted(copies.items(), reverse=True) if all(table.values())]


def _damaged(near: Near, seen: list[_Seen], copies: Copies) -> list[list[str]]:
    """[file, node] of the copies with another hash; every copy is read by one of the ranks that see it."""
    bad = []
    for index, (name, nodes) in enumerate(sorted(copies.items())):
        for s in seen:
            viewers = nodes.get(s.path.parent.name, [])
            mine = viewers and viewers[index % len(viewers)] == near.group.index
            if mine and file_error(s.path, name, s.manifest.files[name], hashed=True) is not None:
                bad.append([name, s.path.parent.name])
    return bad


def _without(copies: Copies, found: list[Any], say: Callable[[str], None]) -> list[Any]:
    """The manifest, and the copies without those that are damaged."""
    bad = {(file, node) for damaged, _ in found for file, node in damaged}
    for file, node in sorted(bad):
        say(f"the copy of {file} in {node} is damaged")
    left = {file: {n: r for n, r in nodes.items() if (file, n) not in bad} for file, nodes in copies.items()}
    return [next(text for _, text in found if text), left]


class NearSource(Source):
    """The tensors of a step of which this rank sees some files.

    First everything is read once while `noting`, which copies nothing; `fetch` brings what this rank does not see, as
    much memory as that takes; then everything is read again.
    """

    def __init__(self, near: Near, manifest: Manifest, seen: dict[str, Path], copies: Copies) -> None:
        super().__init__(near.home / f"step_{manifest.step:08d}", manifest)
        self._near, self._seen, self._copies = near, seen, copies
        self._paths = {
            file: next((seen[node] for node in nodes if node in seen), None) for file, nodes in copies.items()
        }
        self._noted: list[tuple[str, Chunk, Box]] = []
        self._fetched: dict[tuple[str, str, Box], torch.Tensor] = {}
        self.noting = True

    def names(self) -> list[str]:
        """Names of all tensors; files are none."""
        return [name for name in super().names() if not name.startswith(FILES)]

    def files(self) -> list[str]:
        """Names of the further files."""
        return [name.removeprefix(FILES) for name in super().names() if name.startswith(FILES)]

    def beside(self, name: str) -> str | None:
        """What a file says that lies beside the manifest and is no part of the step; None where this rank sees none."""
        found = next((p / name for p in self._seen.values() if (p / name).is_file()), None)
        return None if found is None else found.read_text(encoding="utf-8", errors="replace")

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """As `Source.read`; while noting, only what has to be fetched is written down."""
        if not self.noting:
            super().read(name, box, out)
            return
        for chunk in self._entry(name).chunks:
            common = chunk.box.overlap(box)
            if common is not None and self._paths[chunk.file] is None:
                self._noted.append((name, chunk, common.relative_to(chunk.box)))

    def file(self, name: str) -> bytes:
        """The content of a further file."""
        shape = self._entry(FILES + name).shape
        content = torch.empty(shape, dtype=torch.uint8)
        self.read(FILES + name, Box((0,), shape), content)
        return content.numpy().tobytes()

    def fetch(self) -> int:
        """Bring what was noted; every rank calls it. Returns the bytes that this rank received."""
        group, ranks = self._near.group, self._near.ranks
        wishes = [[n, chunk.file, chunk.key, inside.offset, inside.shape] for n, chunk, inside in self._noted]
        everybody = ranks.broadcast_json(ranks.gather_json(wishes))
        for taker, wanted in enumerate(everybody):
            for name, file, key, offset, shape in wanted:
                viewers = sorted({r for seeing in self._copies[file].values() for r in seeing})
                giver, inside = viewers[taker % len(viewers)], Box(tuple(offset), tuple(shape))
                if group.index == giver:
                    chunk = next(c for c in self._entry(name).chunks if (c.file, c.key) == (file, key))
                    part = self._slice(name, chunk, inside).contiguous().reshape(-1).view(torch.uint8)
                    comm.exchange([(part, group.ranks[taker])], [], group)[0].wait()
                elif group.index == taker:
                    part = torch.empty(inside.shape, dtype=self.info(name)[0])
                    bytes_ = part.reshape(-1).view(torch.uint8)
                    comm.exchange([], [(bytes_, group.ranks[giver])], group)[0].wait()
                    self._fetched[file, key, inside] = part
        self._noted, self.noting = [], False
        return sum(part.nbytes for part in self._fetched.values())

    def _slice(self, name: str, chunk: Chunk, inside: Box) -> torch.Tensor:
        fetched = self._fetched.get((chunk.file, chunk.key, inside))
        return super()._slice(name, chunk, inside) if fetched is None else fetched

    def _place(self, file: str) -> Path:
        return self._paths[file] or self.path
