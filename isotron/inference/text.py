"""Tokens -> text while they come, and the texts that end a sequence. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from isotron.tokenizers.base import Tokenizer

CONTEXT = 6  # tokens before the answer that are decoded with it: alone, its first space might be lost
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Text:
    """The text of an answer as far as it is certain, in pieces that together are the whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: tuple[str, ...] = ()) -> None:
        self._decode, self.stop = tokenizer.decode, stop
        self._ids = list(prompt[-CONTEXT:])
        self._from, self._done = 0, len(self._ids)
        self.whole = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that this token makes certain; a character of several tokens comes with its last one."""
        self._ids.append(token)
        return self._take(last=False)

    def finish(self) -> str:
        """What is left when no token follows."""
        return "" if self.stopped else self._take(last=True)

    def _take(self, last: bool) -> str:
        known = self._decode(self._ids[self._from : self._done]) if self._done > self._from else ""
        now = self._decode(self._ids[self._from :])
        if (now.endswith(UNFINISHED) and not last) or len(now) <= len(known):
            return ""
        piece = now[len(known) :]
        self._from, self._done = max(self._from, self._done - CONTEXT), len(self._ids)
        return self._cut(piece)

    def _cut(self, piece: str) -> str:
        """Ends the text before the first stop text."""
        before = len(self.whole)
        self.whole += piece
        places = [self.whole.find(s, max(0, before - len(s) + 1)) for s in self.stop]
        found = [p for p in places if p >= 0]
        if found:
            self.whole, self.stopped = self.whole[: min(found)], True
        return self.whole[before:]

    @property
    def safe(self) -> int:
        """Characters that no stop text can take back any more."""
        if self.stopped or not self.stop:
            return len(self.whole)
        held = 0
        for s in self.stop:
            for n in range(min(len(s) - 1, len(self.whole)), 0, -1):
                if self.whole.endswith(s[:n]):
                    held = max(held, n)
                    break
        return len(self.whole) - held
