"""Which attempt of a soak wrote the checkpoint that another went on from: the layouts that led to the end."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Segment = tuple[int, dict[str, Any]]  # from this step on, in this layout
RESUMED = re.compile(r"^isotron: resumed from (\S+) at step (\d+)", re.MULTILINE)
LAYOUT = ("tp", "pp", "dp", "zero", "sequence_parallel", "micro_batch_size")


@dataclass
class Lineage:
    """Checkpoints in `places` by writer. chains[i]: the steps that lead to attempt i, by the layout that took them."""

    places: tuple[Path, ...]
    chains: list[list[Segment]] = field(default_factory=list)
    writers: dict[Path, tuple[bytes, int]] = field(default_factory=dict)

    def attempt(self, layout: dict[str, Any], log: str) -> int:
        """Note an attempt that has ended; the step that it went on from."""
        found = RESUMED.search(log)
        start, chain = 0, list[Segment]()
        if found is not None:
            start = int(found[2])
            chain = [s for s in self.chains[self._writer(Path(found[1]))] if s[0] < start]
        self.chains.append([*chain, (start, {k: v for k, v in layout.items() if k in LAYOUT})])
        self._scan()
        return start

    def _writer(self, step: Path) -> int:
        """Of any copy of the step: a node that lost its directory goes on from another's."""
        same = [self.writers[p] for p in self.writers if p.name == step.name and p.parent.parent == step.parent.parent]
        if step in self.writers:
            return self.writers[step][1]
        return max(writer for _, writer in same)

    def _scan(self) -> None:
        for place in self.places:
            for manifest in place.glob("**/step_*/manifest.json"):
                key, data = manifest.parent, manifest.read_bytes()
                if self.writers.get(key, (b"", 0))[0] != data:
                    self.writers[key] = data, len(self.chains) - 1
