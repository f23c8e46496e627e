"""What a task is asked with. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isotron.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Asked:
    """One task on one place.

    name, path: as asked for. tokenizer: of the model. begin: what its own library puts before every text. width: inputs
    of a row at most. stride: between overlapping windows; 0 means they do not overlap. strict: of LAMBADA, the
    whole last word counts. limit: examples at most; 0 means all. key: of the text in JSON.
    """

    name: str
    path: str
    tokenizer: Tokenizer
    begin: tuple[int, ...]
    width: int
    stride: int = 0
    strict: bool = False
    limit: int = 0
    key: str = "text"

    @property
    def start(self) -> tuple[int, ...]:
        """One token to begin at where a text has nothing before it: the library's, else the end of a document."""
        return self.begin[-1:] or (self.tokenizer.eod,)

    def context(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with what belongs before them; never empty."""
        return [*self.begin, *tokens] or list(self.start)
