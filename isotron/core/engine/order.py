"""In which order the gradients of any module are summed: the same on all ranks, whatever each of them has used.

A module that is not ours may leave out a layer on one rank and not on another. So no rank sums a bucket because its
own gradients are there: buckets take their turns, the last parameters first, as a backward comes by them, and one that
is complete waits for those before it. What has no gradient here counts as zero.

Where gradients are not kept whole (ZeRO-2 and 3) each backward has a round of turns. Ranks may have more or fewer of
them, so every round begins with a word, and who has none left asks whether others have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isotron.core import comm
from isotron.core.mesh import Group
from isotron.core.parallel.data import Flat
from isotron.core.parallel.shards import Bucket


class Turns:
    """The buckets of some flats in order. `place`: of a parameter among the module's; `group`: all ranks that sum."""

    def __init__(self, flats: Sequence[Flat], place: dict[str, int], group: Group, device: torch.device) -> None:
        pairs = [(bucket, flat) for flat in flats for bucket in flat.buckets if bucket.trained]
        self._order = sorted(pairs, key=lambda pair: -max(place[name] for name in pair[0].span.names))
        self._rounds = any(bucket.streams for bucket, _ in self._order)
        self._group, self._device = group, device
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._next, self._complete, self._said = 0, set[int](), list[comm.Pending]()

    def complete(self, bucket: Bucket) -> None:
        """All gradients of a bucket are here: it is summed when its turn comes, and those behind it that wait."""
        if bucket.trained:
            self._complete.add(id(bucket))
        while self._next < len(self._order) and id(self._order[self._next][0]) in self._complete:
            self._begin_round()
            self._start()

    def end_backward(self, always: bool = False) -> None:
        """What a backward has left goes into the sums, where they do not wait for the end of the step. `always`: the
        rest of a round, even if there is nothing here.
        """
        if self._rounds and (always or self._next or self._is_open()):
            self._begin_round()
            self._end_round()

    def finish(self) -> None:
        """The step has no more gradients on this rank: every rank has started the same sums when this returns."""
        if not self._rounds:
            self._end_round()
            return
        while self._next or self._is_open():
            self.end_backward()
        while self._others_go_on():
            self._end_round()

    def _is_open(self) -> bool:
        return any(bucket.is_open for bucket, _ in self._order)

    def _begin_round(self) -> None:
        if self._rounds and self._next == 0:
            self._said.append(self._say(1))

    def _end_round(self) -> None:
        """All turns that are left; of a round that has not begun, all."""
        for _ in range(self._next, len(self._order)):
            self._start()

    def _start(self) -> None:
        bucket, flat = self._order[self._next]
        self._complete.discard(id(bucket))
        self._next += 1
        flat.start(bucket)
        if self._rounds:
            self._next %= len(self._order)

    def _say(self, more: int) -> comm.Pending:
        return comm.start_all_gather(torch.tensor([more], device=self._device), self._group, 0)

    def _others_go_on(self) -> bool:
        said, self._said = [*self._said, self._say(0)], []
        return bool([pending.wait() for pending in said][-1].any())
