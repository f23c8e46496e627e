"""Tokens guessed ahead, so that one pass can give several; what is generated does not change.

The model looks at the last token and the guesses in one pass, and chooses at each place as it would have chosen
anyway: by the draw that belongs to (seed, request, position). A guess is right when it is the token so chosen; the
first wrong one is replaced and the rest dropped. So every token is that of plain generation, drawn or not, and a guess
x is accepted with exactly the probability p(x) that the model gives it. A draft model draws with the same numbers as
the model, so that the two agree wherever their distributions put the same token there.
Sources: Leviathan et al. 2023 (checking guesses in one pass); Saxena 2023 (guesses from earlier text). Guesses of a
model's own modules are in `heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from isotron.inference.plan import Span
from isotron.inference.row import Row
from isotron.inference.runner import Runner

# logits [rows, V] where they are known, and each row with its tokens so far -> a token for each
Decide = Callable[[Tensor | None, list[tuple[Row, list[int]]]], list[int]]
LONGEST, SHORTEST = 3, 1  # tokens that must have occurred before
FEW = 32  # rows: a pass of more has enough to compute


class Guesser(Protocol):
    """Fills `guesses` of rows that are answering."""

    def guess(self, rows: Sequence[Row], most: int) -> None:
        """At most `most` tokens per row."""
        ...

    def saw(self, rows: Sequence[Row], spans: Sequence[Span]) -> None:
        """The model has just looked at these spans of these rows."""
        ...


def room(row: Row, most: int, stretch: int) -> int:
    """How many guesses a row can use: within its length, and not over the point where its rotation changes."""
    left = row.limit - len(row.tokens) - 1
    if stretch and not row.salt:
        left = min(left, stretch - len(row.tokens))
    return 0 if row.grammar is not None else max(0, min(most, left))


class FromText:
    """What followed when the last few tokens occurred before, in the prompt or the answer. `weighs`: only while few
    rows answer, and as many as the row's guesses were worth lately.
    """

    def __init__(self, stretch: int, weighs: bool = False) -> None:
        self.stretch, self.weighs = stretch, weighs

    def guess(self, rows: Sequence[Row], most: int) -> None:
        """The longest match decides, of equally long ones the latest."""
        if self.weighs and len(rows) > FEW:
            most = 0
        for row in rows:
            count = room(row, min(most, row.luck.worth) if self.weighs else most, self.stretch)
            row.guesses = _continued(row, count) if count else []

    def saw(self, rows: Sequence[Row], spans: Sequence[Span]) -> None:
        """Nothing."""


def _continued(row: Row, count: int) -> list[int]:
    tokens = row.tokens
    for end in range(row.indexed, len(tokens)):  # the last tokens themselves have no continuation yet
        for n in range(SHORTEST, LONGEST + 1):
            if end >= n:
                row.grams[tuple(tokens[end - n : end])] = end
    row.indexed = len(tokens)
    for n in range(LONGEST, SHORTEST - 1, -1):
        place = row.grams.get(tuple(tokens[-n:])) if len(tokens) >= n else None
        if place is not None:
            return tokens[place : place + count]
    return []


class FromDraft:
    """The tokens that a smaller model would choose. It keeps its own keys and values in pages of the same numbers."""

    def __init__(self, runner: Runner, decide: Decide, stretch: int) -> None:
        self.runner, self.decide, self.stretch = runner, decide, stretch

    def guess(self, rows: Sequence[Row], most: int) -> None:
        """One pass per guess, for all rows together."""
        longest = self.runner.model.config.max_position_embeddings
        going = []
        for row in rows:
            row.guesses = []
            count = room(row, most, self.stretch)
            row.drafted = min(row.drafted, row.held)
            if count and (not longest or len(row.tokens) + count <= longest):
                going.append((row, count))
        while going:
            spans = [self._span(row) for row, _ in going]
            logits = self.runner.run(spans, [1] * len(spans))
            tokens = self.decide(logits, [(row, row.tokens + row.guesses) for row, _ in going])
            for (row, _), token in zip(going, tokens, strict=True):
                row.drafted = len(row.tokens) + len(row.guesses)
                if token >= 0:
                    row.guesses.append(token)
            going = [(r, n) for (r, n), t in zip(going, tokens, strict=True) if t >= 0 and len(r.guesses) < n]

    def saw(self, rows: Sequence[Row], spans: Sequence[Span]) -> None:
        """Nothing."""

    def _span(self, row: Row) -> Span:
        tokens = row.tokens + row.guesses
        begins = self.runner.stretch_begins
        return Span(tokens, row.table, row.drafted, len(tokens) - row.drafted, bool(begins) and len(tokens) > begins)


def accepted(guesses: Sequence[int], chosen: Sequence[int]) -> int:
    """How many guesses are what the model chose; `chosen` has one token more."""
    n = 0
    while n < len(guesses) and guesses[n] == chosen[n]:
        n += 1
    return n
