"""What one pass computes and where its keys and values lie, worked out once for all layers.

Legend: T tokens of the pass, R short spans, S tokens of the longest short span, E entries (a page as one span sees it),
M entries of the span that has most, P tokens of a page.

A pass takes spans: some next tokens of a sequence. Tokens of all spans lie one after the other, short spans first, as
T rows of one token, so that no layer computes padding. Short spans (decoding, and checking guessed tokens) attend page
by page, all in one call; long spans (prompts) attend one span at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isotron.core.mesh import Group

SHORT = 8  # tokens of a span that still attends page by page


@dataclass(frozen=True)
class Span:
    """The tokens at positions `start` .. `start` + `count` - 1 of a sequence whose pages are `table`.

    `long`: rotated as a sequence beyond the positions that its model knew before a stretch.
    """

    tokens: Sequence[int]
    table: Sequence[int]
    start: int
    count: int
    long: bool = False

    @property
    def end(self) -> int:
        """The first position after the span."""
        return self.start + self.count


@dataclass(frozen=True)
class ByPage:
    """How the short spans see the pages under one window.

    pages: (first, last + 1) of a range that is read in place, or slots to gather. row_E: span of each entry. mask_E1SP:
    0 where a query sees a slot, else -inf. table_RM, bias_RMS: the entries of each span, -inf where a query sees none.
    """

    first: int
    slots: Tensor | None
    row_E: Tensor
    mask_E1SP: Tensor
    table_RM: Tensor
    bias_RMS: Tensor


@dataclass
class Pass:
    """Tokens, positions and slots of a pass, short spans first.

    `spread`: ranks that each have an equal part of one span, in their order; `slots_T` are then those of all parts.
    """

    spans: list[Span]
    page: int
    device: torch.device
    dtype: torch.dtype
    spread: Group | None = None
    _by_page: dict[int, ByPage] = field(default_factory=dict)
    _alone: dict[int, slice | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.short = [s for s in self.spans if s.count <= SHORT]
        self.long = [s for s in self.spans if s.count > SHORT]
        self.spans = [*self.short, *self.long]
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for s in self.spans:
            tokens += s.tokens[s.start : s.end]
            positions += range(s.start, s.end)
            slots += [s.table[p // self.page] * self.page + p % self.page for p in self._written(s)]
        self.tokens_T = self._ints(tokens)
        self.positions_T = self._ints(positions)
        self.slots_T = self._ints(slots)
        self.shorts = sum(s.count for s in self.short)
        self.widest = max((s.count for s in self.short), default=0)
        self.single = self.widest == 1
        if not self.single:
            self._index_tokens()

    def _written(self, span: Span) -> range:
        """The positions whose keys and values come into the cache."""
        if self.spread is None:
            return range(span.start, span.end)
        first = span.start - self.spread.index * span.count
        return range(first, first + self.spread.size * span.count)

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long).to(self.device, non_blocking=True)

    def _index_tokens(self) -> None:
        """take_RS: the token of each span's query, its last one where it has fewer; back_T: the way back."""
        take, back, first = [], [], 0
        for r, s in enumerate(self.short):
            take.append([first + min(i, s.count - 1) for i in range(self.widest)])
            back += [r * self.widest + i for i in range(s.count)]
            first += s.count
        self.take_RS, self.back_T = self._ints(take), self._ints(back)

    def alone(self, window: int) -> slice | None:
        """The slots that the pass's only token sees, itself included, where they lie in a row; None where not so."""
        if window not in self._alone:
            self._alone[window] = self._row_of_slots(window) if len(self.tokens_T) == 1 else None
        return self._alone[window]

    def _row_of_slots(self, window: int) -> slice | None:
        (s,) = self.spans
        seen = max(0, s.end - window) if window else 0
        pages = s.table[seen // self.page : (s.end - 1) // self.page + 1]
        if any(b != a + 1 for a, b in zip(pages, pages[1:], strict=False)):
            return None
        first = pages[0] * self.page + seen % self.page
        return slice(first, first + s.end - seen)

    def by_page(self, window: int) -> ByPage:
        """The short spans' view of the cache; computed once per window."""
        if window not in self._by_page:
            self._by_page[window] = self._view(window)
        return self._by_page[window]

    def _view(self, window: int) -> ByPage:
        entries = []  # (page, span, first position on the page)
        for r, s in enumerate(self.short):
            first = max(0, s.start - window + 1) // self.page if window else 0
            entries += [(s.table[n], r, n * self.page) for n in range(first, (s.end - 1) // self.page + 1)]
        entries.sort()
        pages = [page for page, _, _ in entries]
        lowest, beyond = pages[0], pages[-1] + 1
        in_place = len(set(pages)) == len(pages) and 2 * len(pages) >= beyond - lowest
        at = [page - lowest for page in pages] if in_place else list(range(len(pages)))
        size = beyond - lowest if in_place else len(pages)
        row, base = [0] * size, [0] * size
        tables: list[list[int]] = [[] for _ in self.short]
        for place, (_, r, first) in zip(at, entries, strict=True):
            row[place], base[place] = r, first
            tables[r].append(place)
        slots = None
        if not in_place:
            slots = (self._ints(pages)[:, None] * self.page + torch.arange(self.page, device=self.device)).flatten()
        return self._masked(lowest, slots, self._ints(row), self._ints(base), tables, window)

    def _masked(
        self, first: int, slots: Tensor | None, row_E: Tensor, base_E: Tensor, tables: list[list[int]], window: int
    ) -> ByPage:
        at_RS = self.positions_T[: self.shorts, None] if self.single else self.positions_T[self.take_RS]
        at_ES1 = at_RS.index_select(0, row_E)[..., None]
        slot_E1P = base_E[:, None, None] + torch.arange(self.page, device=self.device)
        seen_ESP = slot_E1P <= at_ES1
        if window:
            seen_ESP &= slot_E1P > at_ES1 - window
        hidden = torch.full((), -torch.inf, dtype=self.dtype, device=self.device)
        mask_E1SP = torch.where(seen_ESP, hidden.new_zeros(()), hidden)[:, None]
        most = max(map(len, tables))
        table_RM = self._ints([t + [0] * (most - len(t)) for t in tables])
        real_RM = self._ints([[1] * len(t) + [0] * (most - len(t)) for t in tables]).bool()
        some_RMS = seen_ESP.any(-1)[table_RM] & real_RM[..., None]
        bias_RMS = torch.where(some_RMS, 0.0, -torch.inf)
        return ByPage(first, slots, row_E, mask_E1SP, table_RM, bias_RMS)
