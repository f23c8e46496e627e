"""Which rows are at work, and what the next pass computes of each. PURE.

A row is admitted when the cache has room for its prompt and its longest answer, so that a row at work never has to
give way; rows are admitted in the order in which they came. A pass takes the next token of every row that is answering,
and then as much of the prompts as fits into `chunk` tokens. All ranks decide alike: nothing here looks at a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from isotron.inference.config import EngineConfig
from isotron.inference.pages import Pages
from isotron.inference.row import Row


@dataclass(frozen=True)
class Work:
    """`count` next tokens of a row, guesses among them; `wanted` of them need logits."""

    row: Row
    count: int
    wanted: int


class Scheduler:
    """Rows that wait and rows at work. `stretch`: rows longer than this are rotated otherwise; 0: none is."""

    def __init__(self, pages: Pages, config: EngineConfig, stretch: int = 0) -> None:
        self.pages, self.config, self.stretch = pages, config, stretch
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.waiting and not self.running

    def add(self, rows: Iterable[Row]) -> None:
        """To the end of the queue."""
        self.waiting.extend(rows)

    def admit(self) -> None:
        """Take rows to work while there is room."""
        admitted = []
        for row in self.waiting:
            if len(self.running) >= self.config.rows:
                break
            leader = row.leader
            if leader is not None and not leader.reason and leader.held < leader.prompt:
                continue  # soon its prompt's pages are known
            if not self._enter(row):
                break
            admitted.append(row)
            self.running.append(row)
        for row in admitted:
            self.waiting.remove(row)

    def _enter(self, row: Row) -> bool:
        row.salt = int(self._long(row))
        shared = self.pages.match(row.tokens, row.salt)
        more = self.pages.needed(row.limit) - len(shared)
        if more > self.pages.available:
            self.pages.give_back(shared)
            return False
        row.table = [*shared, *self.pages.take(more)]
        row.held = len(shared) * self.pages.size
        self.pages.hits += row.held
        return True

    def _long(self, row: Row) -> bool:
        return bool(self.stretch) and len(row.tokens) > self.stretch

    def leave(self, row: Row) -> None:
        """The row has ended: its pages are free, and known where they are full."""
        self.pages.give_back(row.table)
        row.table, row.held, row.guesses = [], 0, []
        self.running.remove(row)

    def drop(self, row: Row, reason: str) -> None:
        """End a row before its time, wherever it is; nothing when it has ended."""
        if row.reason:
            return
        row.reason = reason
        if row in self.running:
            self.leave(row)
        else:
            self.waiting.remove(row)

    def restart_stretched(self) -> None:
        """Rows that have just grown beyond the stretch read all their tokens anew: their keys are turned otherwise."""
        for row in [r for r in self.running if self._long(r) != bool(r.salt)]:
            self.leave(row)
            row.drafted = 0
            self.waiting.appendleft(row)

    def plan(self) -> list[Work]:
        """The next pass: answers first, then prompts."""
        budget = self.config.chunk
        answering = [row for row in self.running if row.ready]
        work = [Work(row, 1 + len(row.guesses), 1 + len(row.guesses)) for row in answering]
        budget -= sum(w.count for w in work)
        for row in self.running:
            if row.ready or budget <= 0:
                continue
            left = len(row.tokens) - row.held
            count = min(left, budget)
            work.append(Work(row, count, int(count == left)))
            budget -= count
        return work
