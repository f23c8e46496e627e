"""Which rank is slow: the time of its steps in which it waited for no other rank.

In a job whose ranks meet several times a step, every rank's steps take equally long; what differs is how much of it
each spends waiting. The slowest rank waits least. On devices whose collectives are queued the wait is the device's, and
what is measured is the host's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from isotron.core import comm
from isotron.core.mesh import Group

SLOW = 1.2  # times the median: named as a straggler


@dataclass
class Stragglers:
    """Sums of this rank since the last report."""

    seconds: float = 0.0
    waited: float = 0.0
    steps: int = 0
    _mark: float = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._mark = comm.WAITED.seconds

    def end(self, seconds: float) -> None:
        """It has ended, after so many seconds."""
        self.seconds += seconds
        self.waited += comm.WAITED.seconds - self._mark
        self.steps += 1

    def report(self, group: Group) -> dict[str, Any] | None:
        """On the first rank: busy seconds a step of every rank, the slowest rank, and how much slower than the median.

        Every rank calls it; the sums begin anew.
        """
        busy = max(0.0, self.seconds - self.waited) / max(1, self.steps)
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0
        every = comm.gather_json(busy, group)
        if every is None:
            return None
        ratio = max(every) / max(median(every), 1e-9)
        return {"busy_s": every, "slowest": every.index(max(every)), "ratio": ratio, "straggler": ratio > SLOW}
