"""Which pages of the cache belong to whom, and which of them hold a beginning that another sequence can use. PURE.

A page holds the cached values of `size` consecutive tokens of a sequence. A full page is known by its tokens and by
the page before it, so two sequences with the same beginning share pages; the comparison is of the tokens themselves,
never of a hash alone. A page that nobody uses any more but whose tokens are known stays until its room is needed: the
one that was used least recently goes first. Free pages are given out lowest number first, which keeps those in use
close together.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

ROOT = -1
Key = tuple[int, int, tuple[int, ...]]


class Pages:
    """`count` pages of `size` tokens. `reuse` False: no page is ever shared between sequences by its tokens."""

    def __init__(self, count: int, size: int, reuse: bool = True) -> None:
        self.count, self.size, self.reuse = count, size, reuse
        self._free = list(range(count))
        self._users = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._serial = [0] * count
        self._next = 0
        self.hits = 0  # tokens that need not be computed because their page was known

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.count - self.available

    @property
    def remembered(self) -> int:
        """Pages that nobody holds and whose tokens are known."""
        return len(self._idle)

    def needed(self, tokens: int) -> int:
        """Pages for this many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """That many pages, the lowest free ones first; the caller has looked at `available`."""
        if count > self.available:
            raise RuntimeError(f"{count} pages were asked for, {self.available} are available")
        found = []
        for _ in range(count):
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
                heapq.heappush(self._free, page)
            page = heapq.heappop(self._free)
            self._users[page] = 1
            found.append(page)
        return found

    def give_back(self, table: Sequence[int]) -> None:
        """A sequence no longer needs these pages; the end of a sequence is forgotten before its beginning."""
        for page in reversed(table):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)

    def share(self, table: Sequence[int]) -> list[int]:
        """The same pages for one more user."""
        for page in table:
            self._idle.pop(page, None)
            self._users[page] += 1
        return list(table)

    def match(self, tokens: Sequence[int], salt: int = 0) -> list[int]:
        """Pages of the longest known beginning, now shared; at least one token is left to compute."""
        found: list[int] = []
        parent = ROOT
        for start in range(0, len(tokens) - self.size, self.size) if self.reuse else ():
            page = self._known.get((salt, parent, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            found.append(page)
            parent = self._serial[page]
        return self.share(found)

    def publish(self, tokens: Sequence[int], table: Sequence[int], before: int, held: int, salt: int = 0) -> None:
        """The pages that became full while the sequence grew from `before` to `held` cached tokens are known now."""
        if not self.reuse:
            return
        for number in range(before // self.size, held // self.size):
            page = table[number]
            parent = self._serial[table[number - 1]] if number else ROOT
            if number and table[number - 1] not in self._key:
                return  # its beginning is known under another page
            key = (salt, parent, tuple(tokens[number * self.size : (number + 1) * self.size]))
            if page in self._key or key in self._known:
                continue
            self._next += 1
            self._serial[page] = self._next
            self._known[key], self._key[page] = page, key

    def _forget(self, page: int) -> None:
        del self._known[self._key.pop(page)]
