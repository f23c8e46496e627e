"""Numbers of tokens as people write them: 300B, 1.5T, 300e9. PURE."""

from __future__ import annotations

import re

from isotron.core.errors import refuse

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LEAST = 1e6  # a run of fewer is a number that was meant in another unit
MOST = 1e17  # a thousand times all text that people have written
_AMOUNT = re.compile(r"(\d[\d_,]*(?:\.\d*)?(?:e\+?\d{1,2})?) ?([kmbt]?)", re.ASCII | re.IGNORECASE)


def amount(option: str, text: str) -> float:
    """How many tokens a text means; refuses what is none, and a bare number that is too small to be a run's."""
    asked, fix = f"{option} {text}", f"{option} 300B"
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise refuse(asked, "a number of tokens is written as 300B, 1.5T, 300e9 or 300000000000", fix)
    tokens = float(re.sub("[_,]", "", found[1])) * UNITS[found[2].upper()]
    if 0 < tokens < LEAST:
        case = f"tokens are counted one by one, and {in_words(tokens)} are less than a step; for billions write B"
        raise refuse(asked, case, f"{option} {found[1]}B" if not found[2] else fix)
    if tokens > MOST:
        raise refuse(asked, f"no run has more than {in_words(MOST)}, for which there is no text", fix)
    return tokens


def whole_steps(option: str, tokens: float, per_step: int) -> None:
    """Refuses a run that ends within its first step; 0 tokens mean that nobody said how many."""
    if 0 < tokens < per_step:
        asked, case = f"{option} {in_words(tokens)}", f"one step already takes {per_step:,} tokens"
        raise refuse(asked, case, f"{option} {per_step}, or a smaller --global-batch")


def in_words(tokens: float) -> str:
    """15T, 300B, 1.5M."""
    unit = next((u for u in reversed(UNITS) if tokens >= UNITS[u]), "")
    return f"{tokens / UNITS[unit]:g}{unit}"
