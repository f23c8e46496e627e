"""One microbatch of token sequences: the same object on every pipeline stage and every tensor-parallel rank.

B sequences, S positions. A token's loss counts `loss_mask` times; `labels` are what is predicted where a token stands:
the token after it (so they are already shifted), or of an encoder what it was before it was masked. `doc_ids` is None
unless documents in a row must not see each other. `sample_ids` is the place of each sequence in consumption order over
the whole run; dropout masks are keyed by it. Where an encoder reads another sequence
than the decoder, that is `source`, E positions of which the last of a row are padding: all from `source_lengths` on.
Tokens of several types say theirs in `types`. Pictures are `images`, [pictures, patches, numbers of a patch] of a
floating type, in the order in which the rows have them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from isotron.core.device import upload
from isotron.core.rows import Cuts, Runs, borders


@dataclass(frozen=True)
class Part:
    """The slots of every rank that shares the rows, in rank order, and what is known of the whole rows.

    `positions`: of the whole rows, [B, S over all ranks].
    """

    runs: tuple[Runs, ...]
    cuts: Cuts | None
    positions: torch.Tensor


@dataclass(frozen=True)
class Origin:
    """Where the tokens of one new row come from, whose documents were rows of their own or parts of such before.

    Of the tokens held here: `samples_BS` in consumption order, `slots_BS` in their own rows, and `rows_BS`, which
    row of the global batch that is, -1 for tokens that fill up. `samples_S`, `slots_S`: of all tokens of the new row,
    on the host. `rows` and `length`: of the global batch.
    """

    samples_BS: torch.Tensor
    slots_BS: torch.Tensor
    rows_BS: torch.Tensor
    samples_S: torch.Tensor
    slots_S: torch.Tensor
    rows: int
    length: int

    def at(self, here: torch.Tensor) -> Origin:
        """Of the tokens at these places of the new row."""
        own: dict[str, Any] = {
            name: getattr(self, name).index_select(1, here) for name in ("samples_BS", "slots_BS", "rows_BS")
        }
        return replace(self, **own)

    def to(self, device: torch.device | str) -> Origin:
        """The same where the tokens are."""
        own: dict[str, Any] = {
            name: upload(getattr(self, name), device) for name in ("samples_BS", "slots_BS", "rows_BS")
        }
        return replace(self, **own)


Places = (
    torch.Tensor | Origin
)  # what random numbers of a batch are keyed by: the samples of its rows, or of every token


@dataclass(frozen=True)
class Batch:
    """tokens_BS labels_BS positions_BS doc_ids_BS types_BS sample_ids_B, source_BE source_lengths_B: int64.

    loss_mask_BS: float32. Of rows that are not whole here, for models that predict K tokens further: ahead_(K+1)BS, the
    labels of 0 to K places ahead, and ahead_mask_KBS.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    sample_ids: torch.Tensor
    doc_ids: torch.Tensor | None = None
    part: Part | None = None
    origin: Origin | None = None
    ahead: torch.Tensor | None = None
    ahead_mask: torch.Tensor | None = None
    source: torch.Tensor | None = None
    source_lengths: torch.Tensor | None = None
    images: torch.Tensor | None = None
    types: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: upload(v, device) for k, v in own.items() if isinstance(v, torch.Tensor)}
        moved |= {} if self.origin is None else {"origin": self.origin.to(device)}
        there = replace(self, **moved)
        if "cuts" in self.__dict__:  # counted once, where the documents were at hand
            there.__dict__["cuts"] = self.cuts
        return there

    @cached_property
    def cuts(self) -> Cuts | None:
        """Borders of the documents in each whole row; None when documents are not isolated."""
        if self.part is not None:
            return self.part.cuts
        return None if self.doc_ids is None else tuple(borders(row) for row in self.doc_ids.tolist())

    @property
    def places(self) -> Places:
        """What its random numbers are keyed by."""
        return self.sample_ids if self.origin is None else self.origin

    @property
    def longest(self) -> int:
        """The highest position in the whole rows, plus one."""
        return int((self.positions if self.part is None else self.part.positions).max()) + 1

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[0], self.tokens.shape[1]
