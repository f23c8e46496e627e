"""A sequence while it is generated: its tokens, what is cached of it, and why it ended. PURE apart from its types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from isotron.inference.config import Wish
from isotron.inference.text import Text


@dataclass
class Luck:
    """How the guesses of a row have fared: `bold` are worth a try now, after `rest` passes without any."""

    bold: int = 2  # a pass of three tokens costs a CPU about what a pass of one does: it reads the same weights
    rest: int = 0
    patience: int = 4

    @property
    def worth(self) -> int:
        """Guesses to make in the next pass."""
        return 0 if self.rest else self.bold

    def saw(self, guessed: int, right: int) -> None:
        """The fate of the last guesses: more where all were right, and a pause, twice as long each time, where none."""
        if not guessed:
            self.rest = max(0, self.rest - 1)
        elif right:
            self.bold, self.patience = (7 if right == guessed else 2), 4
        else:
            self.bold, self.rest, self.patience = 2, self.patience, min(32, 2 * self.patience)


@dataclass(eq=False)
class Row:
    """One answer to one request.

    `tokens`: the prompt (`prompt` tokens of it) and the answer. `request` and `sample` key its draws. `table`: its
    pages; the first `held` tokens are in the cache, `drafted` in that of the draft model. `salt`: 1 when it is rotated
    as a long sequence. `leader`: the first answer to the same prompt, whose pages this one shares.
    """

    tokens: list[int]
    prompt: int
    wish: Wish
    request: int
    sample: int = 0
    text: Text | None = None
    leader: Row | None = None
    grammar: Any = None
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    reason: str = ""
    table: list[int] = field(default_factory=list)
    held: int = 0
    drafted: int = 0
    salt: int = 0
    guesses: list[int] = field(default_factory=list)
    grams: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    luck: Luck = field(default_factory=Luck)

    @property
    def limit(self) -> int:
        """Tokens of the whole sequence when it has reached its length."""
        return self.prompt + self.wish.ending.max_new_tokens

    @property
    def new(self) -> list[int]:
        """The answer."""
        return self.tokens[self.prompt :]

    @property
    def ready(self) -> bool:
        """Whether only the last token is not cached: the prompt has been read."""
        return self.held == len(self.tokens) - 1

    def emit(self, token: int, logprob: float | None, tops: list[tuple[int, float]]) -> None:
        """One more token; the row may end with it. A token that is none ends it with "error"."""
        if token < 0:
            self.reason = "error"
            return
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.wish.tops:
            self.tops.append(tops)
        if token in self.wish.ending.stop_ids:
            self.reason = "stop"
        elif self.text is not None:
            self.text.add(token)
            if self.text.stopped:
                self.reason = "stop"
        if self.grammar is not None and not self.reason and self.grammar.take(token):
            self.reason = "stop"
        if not self.reason and len(self.tokens) >= self.limit:
            self.reason = "length"
        if self.reason and self.text is not None:
            self.text.finish()
