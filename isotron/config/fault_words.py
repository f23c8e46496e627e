"""The words of `--inject`: a fault on purpose, and the step and rank that it meets. PURE."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("kill", "kill-save", "term", "hang", "slow", "nan", "glitch", "bitflip", "diskfull")
_WORD = re.compile(rf"({'|'.join(KINDS)})@([1-9]\d*):(\d+)", re.ASCII)


@dataclass(frozen=True)
class Fault:
    """One fault: `step` counts from 1, the step that it meets; `rank` from 0."""

    kind: str
    step: int
    rank: int

    @staticmethod
    def parse(word: str) -> Fault:
        """The fault of KIND@STEP:RANK; ValueError for other words."""
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{word} is not KIND@STEP:RANK with a kind of {', '.join(KINDS)}")
        return Fault(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"
