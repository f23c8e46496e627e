"""Where the blocks of a pass over a large tensor begin, for passes that leave nothing behind but what they write.

Such passes are worked through in place, a block after the other, each with room of its own that is free again behind
it.
"""

from __future__ import annotations

from collections.abc import Sequence


def starts(total: int, step: int) -> Sequence[int]:
    """The first element of every block of `step`."""
    return range(0, total, step)


def some(total: int, step: int) -> Sequence[int]:
    """Those that show all there is to see where tensors have no values: two whole blocks in a row, and the last."""
    every = range(0, total, step)
    return every if len(every) <= 3 else (every[0], every[1], every[-1])
