"""Guesses of a model's own modules for tokens further ahead, from the outputs of its last pass.

The k-th module (from 0) at a place sees the output of the module before it there (of the model, for the first) and the
token k + 1 places on, and guesses the token after that. So at the last place that the model has looked at each module
gives one guess, from the guess before; guesses beyond are the last module's, of its own output, place by place.

Modules keep keys and values in the model's pages. What a module has seen of a guess is seen again once the token is
known: of the k-th, the last k places. Where a beginning came from another row's pages, its last places saw other
successors there: that can cost a guess, and nothing else. Source: DeepSeek-AI 2024b, sections 2.2 and 5.4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isotron.inference.plan import Span
from isotron.inference.row import Row
from isotron.inference.runner import Runner
from isotron.inference.speculate import Decide, room

Parts = list[tuple[int, Tensor]]  # (first place, outputs [T, D] there), one after the other


def followed(parts: Parts, start: int, x_TD: Tensor) -> Parts:
    """Parts that go on with x at `start`: what they had from there on is replaced; all of it where a gap is left."""
    kept = [(first, x[: start - first]) for first, x in parts if first < start]
    whole = bool(kept) and kept[-1][0] + len(kept[-1][1]) == start
    return [*(kept if whole else []), (start, x_TD)]


@dataclass
class _Seen:
    """Of a row, what each module has yet to look at, and the last output of the module that guessed last."""

    waiting: list[Parts]
    last: Tensor | None = field(default=None)


class FromHeads:
    """The tokens that the modules would choose."""

    def __init__(self, runner: Runner, decide: Decide, stretch: int) -> None:
        self.runner, self.decide, self.stretch = runner, decide, stretch
        self.modules = int(runner.model.config.mtp_num_layers)
        self.seen: dict[Row, _Seen] = {}
        runner.keeps_outputs = True

    def saw(self, rows: Sequence[Row], spans: Sequence[Span]) -> None:
        """Keep what the model gave, until the row answers."""
        for row, span in zip(rows, spans, strict=True):
            row.drafted = span.end
        if self.runner.outputs is None:  # a stage before the last
            return
        self.seen = {row: seen for row, seen in self.seen.items() if not row.reason}
        where = {id(span): part for span, part in zip(*self.runner.outputs, strict=True)}
        for row, span in zip(rows, spans, strict=True):
            seen = self.seen.setdefault(row, _Seen([[] for _ in range(self.modules)]))
            seen.waiting[0] = followed(seen.waiting[0], span.start, where[id(span)])

    def guess(self, rows: Sequence[Row], most: int) -> None:
        """One pass of a module per guess, for all rows together."""
        going: list[tuple[Row, int]] = []
        for row in rows:
            row.guesses = []
            count = room(row, most, self.stretch) if row.drafted >= row.held > 0 else 0
            going += [(row, count)] if count else []
        made = 0
        while going:
            inputs = [self._input(row, made) for row, _ in going]
            spans = [span for span, _ in inputs]
            logits, outputs = self.runner.predict(spans, [x for _, x in inputs], min(made, self.modules - 1))
            tokens = self.decide(logits, [(row, row.tokens + row.guesses) for row, _ in going])
            for (row, _), token, span, x_TD in zip(going, tokens, spans, outputs, strict=True):
                row.guesses += [token] if token >= 0 else []
                self._keep(row, made, span.start, x_TD)
            made += 1
            going = [(row, n) for (row, n), token in zip(going, tokens, strict=True) if token >= 0 and made < n]

    def _input(self, row: Row, made: int) -> tuple[Span, Tensor | None]:
        """The places that the next module has not seen, and what it is given there; wrong guesses are cut."""
        seen = self.seen.get(row)
        if made >= self.modules:
            return self._span(row, self.modules, row.held + made - self.modules, 1), seen.last if seen else None
        parts = [] if seen is None else [(first, x) for first, x in seen.waiting[made] if first < row.held]
        first = parts[0][0] if parts else row.held - 1
        kept = [x[: row.held - start] for start, x in parts]
        return self._span(row, made + 1, first, row.held - first), torch.cat(kept) if kept else None

    def _keep(self, row: Row, made: int, start: int, x_TD: Tensor | None) -> None:
        """What a module gave is what the next one is given; the places where it saw a guess wait for the token."""
        seen = self.seen.get(row)
        if seen is None or x_TD is None:
            return
        seen.last = x_TD[-1:].clone()
        if made >= self.modules:
            return
        again = row.held - made
        seen.waiting[made] = [
            (max(first, again), x[max(0, again - first) : row.held - first].clone())
            for first, x in seen.waiting[made]
            if again < row.held and first < row.held and first + len(x) > again
        ]
        if made + 1 < self.modules:
            seen.waiting[made + 1] = followed(seen.waiting[made + 1], start, x_TD)

    def _span(self, row: Row, ahead: int, start: int, count: int) -> Span:
        """Places `start` on, each with the token `ahead` places after it."""
        begins = self.runner.stretch_begins
        tokens = (row.tokens + row.guesses)[ahead:]
        return Span(tokens, row.table, start, count, bool(begins) and len(row.tokens) > begins)
