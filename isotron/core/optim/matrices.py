"""Who holds which boxes of which matrices, who works on which, and what travels. PURE: integers only.

A fused parameter is as many matrices as it has parts: q|k|v are three, gate|up two, and every expert has its own.
Matrices are dealt to the ranks of a group, the most work first, each to the rank with the least so far. They are taken
in rounds, so that at most about `budget` elements of whole matrices are on a rank at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from isotron.core.layout import Box, Rule

Held = Mapping[str, Sequence[Box]]


@dataclass(frozen=True)
class Matrix:
    """A region of a parameter that is one matrix, the rank that works on it, and (rank, box) of every holder of it.

    `sources`: the holders that send, each box once.
    """

    name: str
    box: Box
    owner: int
    holders: tuple[tuple[int, Box], ...]
    sources: tuple[tuple[int, Box], ...]

    @property
    def work(self) -> int:
        """Multiplications of one iteration, up to a factor."""
        return self.box.size * min(self.box.shape)


def parts(rule: Rule) -> list[Box]:
    """The matrices (or vectors) inside one parameter: the parts of a fused dimension, for each expert its own."""
    ends = [{0, size} for size in rule.shape]
    if rule.split is not None:
        ends[rule.split.dim] |= set(accumulate(part.count * part.unit for part in rule.split.parts))
    if rule.experts:
        ends[0] |= set(range(0, rule.shape[0], rule.shape[0] // rule.experts))
    runs = [list(zip(at, at[1:], strict=False)) for at in map(sorted, ends)]
    return [Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*runs)]


def deal(sections: Mapping[str, Sequence[Box]], held: Sequence[Held]) -> list[Matrix]:
    """Matrices with their owners, from each parameter's parts and from what each rank holds; most work first."""
    found = [_matrix(name, box, held) for name, boxes in sorted(sections.items()) for box in boxes]
    found.sort(key=lambda m: (-m.work, m.name, m.box.offset))
    load, dealt = [0] * len(held), []
    for m in found:
        owner = min(range(len(held)), key=lambda rank: (load[rank], rank))
        load[owner] += m.work
        dealt.append(Matrix(m.name, m.box, owner, m.holders, m.sources))
    return dealt


def _matrix(name: str, region: Box, held: Sequence[Held]) -> Matrix:
    holders = [(r, box) for r, boxes in enumerate(held) for box in boxes.get(name, ()) if region.overlap(box)]
    first: dict[Box, int] = {}
    for rank, box in holders:
        first.setdefault(box, rank)
    if sum(box.size for box in first) != region.size or any(region.overlap(box) != box for box in first):
        raise RuntimeError(f"the ranks' pieces of {name} do not make up its matrix at {region.offset} x {region.shape}")
    return Matrix(name, region, 0, tuple(holders), tuple((rank, box) for box, rank in first.items()))


def rounds(matrices: Iterable[Matrix], ranks: int, budget: int) -> list[list[Matrix]]:
    """The matrices in rounds: in each, every rank takes its next ones up to `budget` elements, at least one."""
    queues: list[list[Matrix]] = [[] for _ in range(ranks)]
    for m in matrices:
        queues[m.owner].append(m)
    found = []
    while any(queues):
        taken = []
        for queue in queues:
            room = budget
            while queue and (room == budget or queue[0].box.size <= room):
                room -= queue[0].box.size
                taken.append(queue.pop(0))
        found.append(taken)
    return found
