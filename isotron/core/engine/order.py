"""In which order the gradients of any module are summed: the same on all ranks, whatever each of them has used.

A module that is not ours may leave out a layer on one rank and not on another. So no rank sums a bucket because its
own gradients are there: buckets take their turns, the last parameters first, as a backward comes by them, and one that
is complete waits for those before it. What has no gradient here counts as zero.

Where gradients are not kept whole (ZeRO-2 and 3) each backward has a round of turns. Ranks may have more or fewer of
them, so every round begins with a word, and who has none left asks whether others have. Under ZeRO-3 weights are
gathered between the sums; there a bucket goes when its unit's backward is over, which is at one place on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isotron.core import comm
from isotron.core.mesh import Group
from isotron.core.parallel.data import Flat
from isotron.core.parallel.shards import Bucket


class Turns:
    """The buckets of some flats in order. `names`: the module's parameters; `group`: all ranks that sum.

    `rounds`: gradients are summed backward by backward; else once a step.
    """

    def __init__(self, flats: Sequence[Flat], names: Sequence[str], group: Group, device: torch.device) -> None:
        place = {name: i for i, name in enumerate(names)}
        pairs = [(bucket, flat) for flat in flats for bucket in flat.buckets if bucket.trained]
        self._order = sorted(pairs, key=lambda pair: -max(place[name] for name in pair[0].span.names))
        self.rounds = any(bucket.streams for bucket, _ in self._order)
        self._group, self._device = group, device
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._left, self._complete, self._said = list(self._order), set[int](), list[comm.Pending]()

    @property
    def begun(self) -> bool:
        """Whether a sum of this step has started."""
        return bool(self._said) or len(self._left) < len(self._order)

    def complete(self, bucket: Bucket) -> None:
        """All gradients of a bucket are here: it is summed when its turn comes, and those behind it that wait."""
        self._complete.add(id(bucket))
        while self._left and id(self._left[0][0]) in self._complete:
            self._start(0)

    def complete_everywhere(self, bucket: Bucket) -> None:
        """The same at one place on all ranks, so that its turn is now, if it has not had it in this round."""
        for i, (other, _) in enumerate(self._left):
            if other is bucket:
                self._start(i)
                return

    def end_backward(self, always: bool = False) -> None:
        """What a backward has left goes into the sums, where they do not wait for the end of the step. `always`: the
        rest of a round, even if there is nothing here.
        """
        if self.rounds and (always or len(self._left) < len(self._order) or self._is_open()):
            self._end_round()

    def finish(self) -> None:
        """The step has no more gradients on this rank: every rank has started the same sums when this returns."""
        if not self.rounds:
            self._end_round()
            return
        while len(self._left) < len(self._order) or self._is_open():
            self._end_round()
        while self._others_go_on():
            self._end_round(word=False)

    def _is_open(self) -> bool:
        return any(bucket.is_open for bucket, _ in self._order)

    def _end_round(self, word: bool = True) -> None:
        """All turns that are left; of a round that has not begun, all."""
        for _ in range(len(self._left)):
            self._start(0, word)

    def _start(self, i: int, word: bool = True) -> None:
        if word and self.rounds and len(self._left) == len(self._order):
            self._said.append(self._say(1))
        bucket, flat = self._left.pop(i)
        self._complete.discard(id(bucket))
        flat.start(bucket)
        if self.rounds and not self._left:
            self._left = list(self._order)

    def _say(self, more: int) -> comm.Pending:
        return comm.start_all_gather(torch.tensor([more], device=self._device), self._group, 0)

    def _others_go_on(self) -> bool:
        for pending in self._said:
            pending.wait()
        self._said = []
        return bool(self._say(0).wait().any())


class Course:
    """The units of a module in the order in which a forward ran them, and how far the backward has come. So all ranks
    know at one place that a unit is over, though one of them may have left out a part of it.
    """

    def __init__(self) -> None:
        self._ran: list[str] = []
        self._at = 0  # behind what the backward has come to
        self._over: set[str] = set()

    def ran(self, unit: str) -> None:
        """The forward has left a unit."""
        self._ran.append(unit)
        self._at = len(self._ran)

    def come_to(self, unit: str) -> list[str]:
        """The backward has come to a unit: those that are over now, which the forward only ran later."""
        self._at = next((i for i in reversed(range(self._at)) if self._ran[i] == unit), self._at)
        before = {*self._ran[: self._at + 1], *self._over}
        over = [name for name in dict.fromkeys(reversed(self._ran[self._at :])) if name not in before]
        self._over.update(over)
        return over
