"""Documents of different length dealt to groups of ranks, so that every rank has equal work. PURE.

A short document is one rank's; a long one is shared by 2, 4, 8 .. neighbouring ranks, as few as hold it with at most
`most` slots each, or as many as it takes not to keep others waiting. Groups of one size are laid side by side from the
first rank on, so a group lies inside one of the next size; every rank works from the largest group it is in to the
smallest, and therefore no two ranks wait for each other. Short documents are packed into rows of up to `most` slots.
Where that hardly saves work, rows stay as they are and are shared by all ranks, as without all this.

Source of the idea: dynamic context parallelism of Megatron-LM; the packing is longest-processing-time-first (Graham
1969).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isotron.core.errors import refuse
from isotron.core.parallel.split import model_costs
from isotron.core.rows import zigzag

GAIN = 1.05  # by which the busiest rank's work must fall, or rows stay as they are
MICROBATCH_TOKENS = 64  # as many tokens' work is what a microbatch costs by itself: launches, messages


@dataclass(frozen=True)
class Costs:
    """Work of a token, of a query that meets a key, of a microbatch by itself, and of passing a token's keys and values
    on once, in any unit; without that of a microbatch documents are dealt anew in any case.
    """

    token: float
    pair: float
    microbatch: float = 0.0
    message: float = 0.0

    def of(self, length: int) -> float:
        """Work of a document of `length` tokens."""
        return self.token * length + self.pair * length * (length + 1) / 2

    def share(self, length: int, size: int) -> float:
        """Work of each of `size` ranks that hold a document together: its part of it, and all the others' keys."""
        return (self.of(length) + self.message * length * (size - 1)) / size


@dataclass(frozen=True)
class Piece:
    """A document: slots [start, start + length) of row `row`."""

    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Share:
    """One microbatch: documents laid one after the other, over `size` ranks from number `first` on."""

    first: int
    size: int
    pieces: tuple[Piece, ...]

    def has(self, rank: int) -> bool:
        """Whether the rank works on it."""
        return self.first <= rank < self.first + self.size


def document_costs(config: Any) -> Costs:
    """Multiply-adds of a token in all matrices, and of a pair in all blocks, from a model's layout table."""
    costs, layers = model_costs(config), config.num_layers
    pair = 2.0 * config.num_attention_heads * config.head_size * layers
    scores = pair / 2 * max(config.max_position_embeddings, 0)  # what model_costs has for attention
    token = sum(costs.blocks) - scores + costs.last
    return Costs(token, pair, MICROBATCH_TOKENS * token)


def largest_group(ranks: int) -> int:
    """The largest power of two that divides the number of ranks."""
    return ranks & -ranks


def sizes_of(ranks: int) -> tuple[int, ...]:
    """Group sizes, 1 first."""
    return tuple(1 << i for i in range(largest_group(ranks).bit_length()))


def deal(pieces: Sequence[Piece], ranks: int, most: int, costs: Costs) -> list[Share]:
    """The microbatches of a step over all ranks, larger groups first; every rank has at least one."""
    anew, rows = _dealt_anew(pieces, ranks, most, costs), _rows_shared(pieces, ranks, most) if costs.microbatch else []
    return rows if rows and max(loads(rows, ranks, costs)) <= GAIN * max(loads(anew, ranks, costs)) else anew


def evened(shares: Sequence[Share], ranks: int) -> list[Share]:
    """With empty microbatches behind the others, as many for every rank; those of one number meet."""
    held = [sum(s.has(rank) for s in shares) for rank in range(ranks)]
    return [*shares, *(Share(rank, 1, ()) for rank in range(ranks) for _ in range(max(held) - held[rank]))]


def _rows_shared(pieces: Sequence[Piece], ranks: int, most: int) -> list[Share]:
    """Every row shared by all ranks; nothing where these are no group or cannot hold a row."""
    rows: dict[int, list[Piece]] = {}
    for piece in pieces:
        rows.setdefault(piece.row, []).append(piece)
    fit = largest_group(ranks) == ranks and all(sum(p.length for p in row) <= most * ranks for row in rows.values())
    return [Share(0, ranks, tuple(row)) for row in rows.values()] if fit else []


def _dealt_anew(pieces: Sequence[Piece], ranks: int, most: int, costs: Costs) -> list[Share]:
    fair = sum(costs.of(p.length) for p in pieces) / ranks
    order = sorted(pieces, key=lambda p: (-p.length, p.row, p.start))
    of_size: dict[int, list[Piece]] = {size: [] for size in sizes_of(ranks)}
    for piece in order:
        of_size[_group_for(piece.length, ranks, most, costs, fair)].append(piece)
    load = [0.0] * ranks
    shares: list[Share] = []
    for size in sorted(of_size, reverse=True):
        mine: dict[int, list[Piece]] = {}
        for piece in of_size[size]:
            first = min(range(0, ranks, size), key=lambda r: (load[r], r))
            mine.setdefault(first, []).append(piece)
            for rank in range(first, first + size):
                load[rank] += costs.share(piece.length, size)
        for first, held in sorted(mine.items()):
            rows = [[p] for p in held] if size > 1 else _packed(held, most)
            shares += [Share(first, size, tuple(row)) for row in rows]
    return shares + [Share(r, 1, ()) for r in range(ranks) if not any(s.has(r) for s in shares)]


def _group_for(length: int, ranks: int, most: int, costs: Costs, fair: float) -> int:
    """Ranks for a document: as few as hold it, and more where its share would be above a rank's fair one."""
    largest = largest_group(ranks)
    size = 1
    while size < largest and (length > most * size or costs.share(length, size) > fair):
        size *= 2
    if length > most * size:
        need = -(-length // largest)
        case = f"a document of {length} tokens is dealt to at most {largest} of {ranks} ranks, {need} slots each"
        raise refuse(f"--max-seqlen-per-dp-cp-rank {most}", case, f"--max-seqlen-per-dp-cp-rank {need}")
    return size


def _packed(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Rows of at most `most` slots, the longest documents first, each into the first row with room."""
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in pieces:
        fits = next((i for i, free in enumerate(room) if free >= piece.length), None)
        if fits is None:
            rows.append([piece])
            room.append(most - piece.length)
        else:
            rows[fits].append(piece)
            room[fits] -= piece.length
    return rows


def loads(shares: Sequence[Share], ranks: int, costs: Costs) -> list[float]:
    """Work of every rank."""
    found = [0.0] * ranks
    for share in shares:
        for i in range(share.size):
            found[share.first + i] += costs.microbatch + _part(share, i, costs)
    return found


def _part(share: Share, i: int, costs: Costs) -> float:
    """Work of member `i` of a group: one document is cut so that all have the same, several in a row are not."""
    if share.size == 1 or len(share.pieces) <= 1:
        return sum(costs.share(p.length, share.size) for p in share.pieces)
    total = sum(p.length for p in share.pieces)
    runs, start, pairs = zigzag(i, share.size, -(-total // (2 * share.size)) * 2 * share.size), 0, 0.0
    for piece in share.pieces:
        for run in runs:
            low, high = max(run.row, start) - start, min(run.row + run.length, start + piece.length) - start
            pairs += max(0, high - low) * (low + high + 1) / 2
        start += piece.length
    return costs.share(total, share.size) - costs.pair * (total * (total + 1) / 2 / share.size - pairs)
