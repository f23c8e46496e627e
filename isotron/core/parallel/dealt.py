"""Dynamic context parallelism: the rows of a global batch taken apart into documents, which are dealt anew to groups of
ranks of different size (`deal.py`), and the core of an attention layer that knows all these groups.

Every rank is given the whole global batch and finds the same deal from it, so nothing is communicated. A document sees
what it saw in its row: its own tokens, positions and labels. Documents without a label that counts are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Batch, Origin, Part
from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.nn.mtp import looked_ahead
from isotron.core.parallel.deal import Costs, Piece, Share, deal, evened
from isotron.core.rows import slots, whole, zigzag

_FIELDS = ("tokens", "labels", "loss_mask", "positions")


class Varied(nn.Module):
    """Socket: the core of a layer for microbatches of groups of different size, `cores` by their size above 1."""

    def __init__(self, plain: Causal, cores: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.plain = plain
        self.cores = nn.ModuleDict({str(size): core for size, core in cores.items()})

    def forward(
        self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, ctx: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_BHSN of the local queries."""
        part = ctx.batch.part
        core = self.plain if part is None or len(part.runs) == 1 else self.cores[str(len(part.runs))]
        return core(q_BHSN, k_BKSN, v_BKSN, ctx, sinks_H)


def dealt(
    batches: Sequence[Batch],
    rank: int,
    ranks: int,
    most: int,
    costs: Costs,
    unit: int = 1,
    every: bool = False,
    in_rounds: bool = False,
    depths: int = 0,
) -> list[Batch]:
    """This rank's microbatches of a global batch, given as whole rows. `unit`: what divides a rank's slots. `every`:
    documents without a label that counts too. `in_rounds`: as many microbatches on every rank, the last ones empty.
    `depths`: of predictions further ahead.
    """
    rows = looked_ahead(joined_rows(batches), depths)
    shares = deal(documents(rows, every), ranks, most, costs)
    if in_rounds:
        shares = evened(shares, ranks)
    return [local_row(rows, share, rank, unit) for share in shares if share.has(rank)]


def joined_rows(batches: Sequence[Batch]) -> Batch:
    """Batches of whole rows of one length as one."""
    if len(batches) == 1:
        return batches[0]
    fields: dict[str, Any] = {name: torch.cat([getattr(b, name) for b in batches]) for name in (*_FIELDS, "sample_ids")}
    docs = [b.doc_ids for b in batches if b.doc_ids is not None]
    return replace(batches[0], **fields, doc_ids=torch.cat(docs) if docs else None)


def documents(rows: Batch, every: bool = False) -> list[Piece]:
    """The documents of all rows that have a label that counts, or all of them."""
    cuts = rows.cuts or ((0, rows.shape[1]),) * rows.shape[0]
    counted = torch.nn.functional.pad((rows.loss_mask != 0).long().cumsum(1), (1, 0)).tolist()
    return [
        Piece(row, start, stop - start)
        for row, borders in enumerate(cuts)
        for start, stop in zip(borders, borders[1:], strict=False)
        if every or counted[row][stop] > counted[row][start]
    ]


def local_row(rows: Batch, share: Share, rank: int, unit: int) -> Batch:
    """What a rank of a group holds of the group's row; the row ends in slots that do not count."""
    row = _row(rows, share.pieces, (2 * share.size if share.size > 1 else 1) * unit)
    length = row.shape[1]
    runs = tuple(zigzag(i, share.size, length) for i in range(share.size))
    if share.size == 1:
        return replace(row, part=Part((whole(length),), row.cuts, row.positions))
    here = torch.tensor(slots(runs[rank - share.first]), device=row.tokens.device)
    names = (*_FIELDS, "ahead", "ahead_mask")
    fields = {name: x.index_select(-1, here) for name in names if (x := getattr(row, name)) is not None}
    origin = None if row.origin is None else row.origin.at(here)
    return replace(row, **fields, doc_ids=None, part=Part(runs, row.cuts, row.positions), origin=origin)


def _row(rows: Batch, pieces: Sequence[Piece], multiple: int) -> Batch:
    """Documents one after the other in a row of their own, filled up to a multiple."""
    length = sum(p.length for p in pieces)
    free = max(multiple, -(-length // multiple) * multiple) - length
    fields: dict[str, Any] = {}
    for name in (*_FIELDS, "ahead", "ahead_mask"):
        whole_rows = getattr(rows, name)
        if whole_rows is None:
            continue
        parts = [whole_rows[..., p.row, p.start : p.start + p.length] for p in pieces]
        fields[name] = torch.cat([*parts, whole_rows.new_zeros((*whole_rows.shape[:-2], free))], -1).unsqueeze(-2)
    # behind one document the fill sees it and is not seen by it
    numbers = [torch.full((p.length,), i) for i, p in enumerate(pieces)]
    docs = torch.cat([*numbers, torch.full((free,), len(pieces))])[None] if len(pieces) > 1 else None
    first = pieces[0].row if pieces else 0
    ids = rows.sample_ids[first : first + 1]
    docs = None if docs is None else docs.to(rows.tokens.device)
    return replace(rows, **fields, sample_ids=ids, doc_ids=docs, origin=_origin(rows, pieces, free))


def _origin(rows: Batch, pieces: Sequence[Piece], free: int) -> Origin:
    """Of the tokens of a new row whose last `free` ones fill it up."""
    ids = rows.sample_ids.cpu()
    fill = torch.zeros(free, dtype=torch.int64)
    samples = torch.cat([*(ids[p.row].expand(p.length) for p in pieces), fill])
    at = torch.cat([*(torch.arange(p.start, p.start + p.length) for p in pieces), fill])
    numbers = torch.cat([*(torch.full((p.length,), p.row) for p in pieces), fill - 1])
    here = Origin(samples[None], at[None], numbers[None], samples, at, *rows.shape)
    return here.to(rows.tokens.device)
