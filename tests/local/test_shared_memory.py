"""Ranks that meet in memory, here threads of one process: what comes, in which order, and what happens without it."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from isotron.core import shared_memory as shm

pytestmark = pytest.mark.skipif(not shm.supported(), reason="this system has no memory without a file")


def together(size: int, body: Callable[[shm.Line], Any], timeout: float = 20.0, waits: float = 0.0) -> list[Any]:
    """What `body` gives on every rank's line, which waits so long for a message (as long as the whole, unless said)."""
    cards, met = [b""] * size, threading.Barrier(size)

    def exchange(index: int, card: bytes) -> list[bytes]:
        cards[index] = card
        met.wait(timeout)
        return list(cards)

    def rank(index: int) -> Any:
        line = shm.meet(index, size, lambda card: exchange(index, card), waits or timeout)
        assert line is not None
        return body(line)

    with ThreadPoolExecutor(size) as threads:
        return [f.result(timeout + 10) for f in [threads.submit(rank, i) for i in range(size)]]


def numbers(line: shm.Line, count: int, which: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64) + 1000 * line.index + which


def came(post: shm.Post, which: int, count: int) -> bool:
    """Whether every rank's numbers are there."""
    post.wait()
    want = torch.arange(count, dtype=torch.float64) + which
    right = all(torch.equal(part.view(torch.float64), want + 1000 * i) for i, part in enumerate(post.parts()))
    post.done()
    return right


SMALL, LARGE = 5, 3000  # float64 numbers on both sides of what goes through the streams


@pytest.mark.parametrize("size", [2, 3])
def test_messages_come_whole_whatever_the_order_of_waits(size: int) -> None:
    assert SMALL * 8 <= shm.INLINE < LARGE * 8

    def body(line: shm.Line) -> list[bool]:
        right = []
        for turn in range(5):
            counts = [LARGE, SMALL, 0, LARGE, SMALL]
            posts = [line.post(numbers(line, n, turn + i)) for i, n in enumerate(counts)]
            for i in (4, 0, 3, 2, 1) if line.index else (3, 2, 4, 1, 0):
                right.append(came(posts[i], turn + i, counts[i]))
        return right

    assert all(all(right) for right in together(size, body))


def test_rows_reach_their_rank_and_sizes_may_differ() -> None:
    def body(line: shm.Line) -> tuple[list[int], list[int]]:
        rows = line.post(torch.arange(6, dtype=torch.uint8).view(3, 2) + 10 * line.index, rows=True)
        uneven = line.post(torch.full((line.index,), line.index, dtype=torch.uint8), sizes=[0, 1, 2])
        rows.wait()
        uneven.wait()
        return torch.cat(rows.parts()).tolist(), torch.cat(uneven.parts()).tolist()

    found = together(3, body)
    assert [rows for rows, _ in found] == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 5, 14, 15, 24, 25]]
    assert [uneven for _, uneven in found] == [[1, 2, 2]] * 3


def test_there_is_no_room_while_large_messages_are_unread() -> None:
    def body(line: shm.Line) -> list[bool]:
        x, room, posts = torch.zeros(shm.INLINE + 1, dtype=torch.uint8), [], []
        for _ in range(shm.SLOTS):
            room.append(line.has_room(x.numel()))
            posts.append(line.post(x))
        room += [line.has_room(x.numel()), line.has_room(shm.INLINE)]
        for post in posts[1:] + posts[:1]:
            post.wait()
            post.done()
            room.append(line.has_room(x.numel()))
        return [*room, line.has_room(shm.SLOT + 1)]

    assert together(2, body) == [[True] * shm.SLOTS + [False, True] + [False] * (shm.SLOTS - 1) + [True, False]] * 2


def test_a_slow_reader_is_waited_for_before_its_slot_is_written_again() -> None:
    count = 2 * shm.SLOTS + 1

    def body(line: shm.Line) -> list[bool]:
        right = []
        for i in range(count):
            post = line.post(numbers(line, LARGE, i))
            post.wait()
            if line.index:
                threading.Event().wait(0.01)  # the other rank is far ahead by now, or waits
            right.append(came(post, i, LARGE))
        return right

    assert all(all(right) for right in together(2, body))


class Growing:
    """The count of a rank that reads its next message whenever somebody looks."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return self.count - 1


def test_a_rank_that_catches_up_between_two_looks_does_not_hide_another_that_has_not() -> None:
    """Three ranks: what one of them has read says nothing of the other, whenever each is looked at."""

    def body(line: shm.Line) -> list[int | None]:
        if line.index:
            return []
        slow: list[Any] = [[0], Growing(), [0]]
        line._counts = slow
        found = [line._behind(0), line._behind(0)]
        slow[2] = [1]
        return [*found, line._behind(0)]

    assert together(3, body)[0] == [1, 2, None]


@pytest.mark.parametrize("size", [3, 4])
def test_turns_come_whole_however_fast_they_follow(size: int) -> None:
    """Every rank's pieces in every turn, with slots so small that each is written again and again."""
    count = 200

    def body(line: shm.Line) -> int:
        right: list[bool] = []

        def take(turn: int) -> Callable[[list[torch.Tensor]], None]:
            want = torch.arange(40, dtype=torch.float64) + turn
            return lambda parts: right.append(
                all(torch.equal(p.view(torch.float64), want + 1000 * i) for i, p in enumerate(parts))
            )

        line.take_turns(shm.Turn(numbers(line, 40, n), [320] * size, take(n)) for n in range(count))
        return sum(right)

    with patch.multiple(shm, INLINE=256, SLOT=320):
        assert together(size, body) == [count] * size


def test_streams_that_are_full_on_both_sides_do_not_stop_anybody() -> None:
    x = torch.zeros(shm.INLINE, dtype=torch.uint8)

    def body(line: shm.Line) -> int:
        posts = [line.post(x) for _ in range(200)]  # 1.6 MB to each other, of which a stream holds a part
        posts[-1].wait()
        return sum(post.is_completed() for post in posts)

    assert together(2, body) == [200, 200]


@pytest.mark.parametrize("large", [False, True])
def test_a_rank_that_has_ended_is_an_error_at_once(large: bool) -> None:
    x = torch.zeros(shm.INLINE + 1 if large else 8, dtype=torch.uint8)

    def body(line: shm.Line) -> str:
        first = line.post(x)
        first.wait()
        first.done()
        if line.index == 1:
            return "ends"
        try:
            for _ in range(shm.SLOTS + 2):
                post = line.post(x)
                post.wait()
                post.done()
        except RuntimeError as error:
            return str(error)
        return "nothing happened"

    said = together(3, body, timeout=20.0)
    assert said[1] == "ends"
    assert all("Connection closed by peer: rank" in said[i] for i in (0, 2)), said


def test_a_timeout_may_be_of_years() -> None:
    assert together(2, lambda line: line.post(torch.ones(1)).wait(), timeout=20.0, waits=1e9) == [None, None]


def test_a_rank_that_is_late_is_named() -> None:
    go_on = threading.Event()

    def body(line: shm.Line) -> str:
        if line.index == 1:
            go_on.wait(10)
            return ""
        try:
            line.post(torch.zeros(1)).wait()
        except RuntimeError as error:
            return str(error)
        finally:
            go_on.set()
        return "nothing happened"

    assert "rank 1 of 2 that met in memory is late" in together(2, body, waits=0.5)[0]


def test_a_stranger_that_calls_is_turned_away() -> None:
    names = [os.urandom(16) for _ in range(2)]
    listeners = []
    for name in names:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(shm._address(name))
        listener.listen(4)
        listeners.append(listener)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(shm._address(names[0]))
        stranger.send(bytes(36))
        with ThreadPoolExecutor(2) as threads:
            lines = [threads.submit(shm._connect, i, names, listeners[i], 10.0) for i in range(2)]
            posts = [line.result(20).post(torch.ones(3)) for line in lines]
        for post in posts:
            post.wait()
            assert [part.numel() for part in post.parts()] == [12, 12]
        assert stranger.recv(1) == b""
    for listener in listeners:
        listener.close()


def test_who_is_elsewhere_or_has_turned_it_off_does_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.meet(0, 2, lambda card: [card, os.urandom(32)], 1.0) is None
    cards: list[bytes] = []
    monkeypatch.setenv(shm.OFF, "1")
    for _ in range(2):
        assert shm.meet(0, 2, lambda card: [cards.append(card) or card] * 2, 1.0) is None  # type: ignore[func-returns-value]
    assert cards[0][:16] != cards[1][:16]  # nor do the others take it for one of them


def test_a_sandbox_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert not shm.supported()
    assert shm.meet(0, 2, lambda card: [card, card], 1.0) is None


def test_nothing_is_left_open() -> None:
    def body(line: shm.Line) -> None:
        post = line.post(torch.zeros(shm.INLINE + 1, dtype=torch.uint8))
        post.wait()
        post.done()

    together(2, body)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        together(3, body)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "memfd:isotron" not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(("one", "other"), [(SMALL, SMALL + 1), (SMALL, LARGE), (LARGE, LARGE + 1), (0, SMALL)])
def test_ranks_that_have_come_apart_say_so(one: int, other: int) -> None:
    def body(line: shm.Line) -> str:
        with pytest.raises(RuntimeError, match="come apart") as told:
            line.post(numbers(line, other if line.index else one, 0)).wait()
        return str(told.value)

    said = together(2, body)
    assert f"sent {other * 8} bytes where this rank expects {one * 8}" in said[0]
    assert f"sent {one * 8} bytes where this rank expects {other * 8}" in said[1]
