"""Every communication of a step: over whom, how often, how many bytes, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import AXES, Group, coordinate_of
from isotron.train.dryrun.reasons import reason

ROOT = Path(comm.__file__).resolve().parents[1]
WATCHED = (
    *("start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_reduce_flat", "start_gather_flat"),
    *("start_all_to_all", "exchange", "broadcast", "barrier", "gather_json", "broadcast_json"),
)


@dataclass(frozen=True)
class Key:
    """What makes two communications the same: the function, the axes and the size of its group, and who calls it."""

    function: str
    axes: tuple[str, ...]
    size: int
    file: str

    @property
    def reason(self) -> str:
        """Why it is there."""
        return reason(self.function, self.file)


@dataclass
class Sums:
    """How many calls, and bytes of all of them: of the whole that is summed or put together, or of what this rank
    sends in an exchange or an all-to-all.
    """

    count: int = 0
    bytes: int = 0


@dataclass
class Calls:
    """What one rank has said."""

    sizes: Mapping[str, int]
    sums: dict[Key, Sums] = field(default_factory=dict)
    _axes: dict[tuple[int, ...], tuple[str, ...]] = field(default_factory=dict)

    def note(self, function: str, group: Group, size: int) -> None:
        """One call."""
        found = self.sums.setdefault(Key(function, self._axes_of(group.ranks), group.size, _caller()), Sums())
        found.count += 1
        found.bytes += size

    def _axes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        if ranks not in self._axes:
            where = [coordinate_of(r, self.sizes) for r in ranks]
            self._axes[ranks] = tuple(a for a in AXES if len({w[a] for w in where}) > 1)
        return self._axes[ranks]

    def copy(self) -> dict[Key, Sums]:
        """The sums as they are now."""
        return {key: Sums(sums.count, sums.bytes) for key, sums in self.sums.items()}

    def beyond(self, before: Mapping[Key, Sums]) -> dict[Key, Sums]:
        """What has been added to an earlier `copy`."""
        found = {}
        for key, sums in self.sums.items():
            then = before.get(key, Sums())
            if sums.count > then.count:
                found[key] = Sums(sums.count - then.count, sums.bytes - then.bytes)
        return found

    def add(self, more: Mapping[Key, Sums]) -> None:
        """Count calls that were not made."""
        for key, sums in more.items():
            found = self.sums.setdefault(key, Sums())
            found.count += sums.count
            found.bytes += sums.bytes

    def extended(self, shorter: Calls, times: int) -> Calls:
        """What a longer step says: this one and, `times` over, what it has more than a shorter one."""
        found = Calls(self.sizes)
        for key, sums in self.sums.items():
            before = shorter.sums.get(key, Sums())
            more = sums.count - before.count, sums.bytes - before.bytes
            found.sums[key] = Sums(sums.count + times * more[0], sums.bytes + times * more[1])
        return found


@contextmanager
def listening(sizes: Mapping[str, int]) -> Iterator[Calls]:
    """Notes every communication of this process inside."""
    calls = Calls(sizes)
    with ExitStack() as stack:
        for name in WATCHED:
            stack.enter_context(patch.object(comm, name, _watched(name, getattr(comm, name), calls)))
        yield calls


def _watched(name: str, real: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        group = next(a for a in (*args, *kwargs.values()) if isinstance(a, Group))
        if group.size > 1:
            calls.note(name.removeprefix("start_"), group, _bytes(name, args, group))
        return real(*args, **kwargs)

    return call


def _bytes(name: str, args: tuple[Any, ...], group: Group) -> int:
    first = args[0] if args else None
    if name == "exchange":
        return sum(x.nbytes for x, _ in args[0])
    if not isinstance(first, Tensor):
        return 0
    if name == "start_all_to_all":
        away = sum(args[1]) - args[1][group.index]
        return away * first[:1].nbytes if len(first) else 0
    return first.nbytes * (group.size if name == "start_all_gather" else 1)


def _caller() -> str:
    """The file of the program that has called the communication."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, comm.__file__):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
