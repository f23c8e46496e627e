"""Ranks of one machine meet in its memory: what each has for the others, without a network in between.

gloo sends over TCP, inside a machine too: a sum of a few numbers takes 0.3 ms between two ranks and several between
four. Here every pair of ranks has a stream (a Unix socket), and every rank has slots of memory that the others see. A
small message goes into the streams; a large one is copied into a slot, and the streams say so. Nobody polls, and a rank
that has died is seen at once, since its streams end.

Everything that is posted on a line comes in the same order on all its ranks, so a message needs no name. It begins with
its size, and who gets another than it expects says that the ranks have come apart. There is no room for a large one
while this rank itself has not read what the slot holds; else a post waits at most for others to read what this rank has
read. What is larger than a slot goes in turns, as many under way as there are slots.

Only Linux has what this needs (memory without a file, sockets without one); `ISOTRON_SHM_DISABLE=1` turns it off.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import selectors
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

INLINE = 1 << 13  # bytes that go through the streams themselves
SLOT = 1 << 23  # bytes of a slot, the largest message; memory is taken as it is first written
SLOTS = 3  # a layer's backward has up to three messages under way
MOST_RANKS = 16  # beyond, so many streams cost more than they save
FRONT = mmap.PAGESIZE  # before the slots: how many large messages this rank has read
OFF = "ISOTRON_SHM_DISABLE"
TURN_SECONDS = 0.0002  # between two looks whether a slot has been read
LOOK_SECONDS = 600.0  # a timeout may be of years, and a wait of the system not
HEADER = 8  # bytes before every message: how many it has for the one who gets it
TOKEN = b"!"
READ_BYTES = 1 << 18


def supported() -> bool:
    """Whether this system has what it takes (a sandbox may forbid it), and nobody has turned it off."""
    if not hasattr(os, "memfd_create") or os.environ.get(OFF, "") not in ("", "0"):
        return False
    try:
        os.close(os.memfd_create("isotron"))
        _listener(os.urandom(16)).close()
    except OSError:
        return False
    return True


def place() -> bytes:
    """16 bytes that processes share when they can meet in memory (one kernel, one space of sockets, one user)."""
    here = [Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")]
    if not all(path.exists() for path in here):
        return os.urandom(16)
    said = f"{here[0].read_text(encoding='ascii')} {here[1].stat().st_ino} {os.getuid()}"
    return hashlib.sha256(said.encode()).digest()[:16]


class Post:
    """A message of every rank under way: `wait`, take `parts`, then `done`. For this rank there are `sizes[i]` bytes
    of rank i's, of a large message from byte `start` on.
    """

    def __init__(self, line: Line, sizes: Sequence[int], number: int | None, own: Tensor, start: int = 0) -> None:
        self.line, self.sizes, self.number, self.start = line, sizes, number, start
        self.parts_here = [own] * len(sizes)

    def is_completed(self) -> bool:
        """Whether everybody's message is here."""
        return self.line.arrived(self, None)

    def wait(self) -> None:
        """Block until everybody's message is here."""
        self.line.arrived(self, time.monotonic() + self.line.timeout)

    def parts(self) -> list[Tensor]:
        """The bytes of every rank, in rank order. Large ones are the others' memory: read only, until `done`."""
        return self.parts_here if self.number is None else self.line.read(self.number, self.start, self.sizes)

    def done(self) -> None:
        """The parts have been read."""
        if self.number is not None:
            self.line.was_read(self.number)


class Turn(NamedTuple):
    """What this rank gives, of no more than a slot; the bytes of every rank's; and what takes the bytes of all, None
    where they are for others.
    """

    own: Tensor
    sizes: Sequence[int]
    take: Callable[[list[Tensor]], object] | None


def _finish(post: Post, turn: Turn) -> None:
    post.wait()
    if turn.take is not None:
        turn.take(post.parts())
    post.done()


class Line:
    """The streams and slots of some ranks; `timeout` in seconds is how long a message may take to come."""

    def __init__(self, index: int, streams: dict[int, socket.socket], maps: list[mmap.mmap], timeout: float) -> None:
        self.index, self.size, self.timeout = index, len(maps), timeout
        self._streams, self._inbox = streams, {i: bytearray() for i in streams}
        self._ended: set[int] = set()
        self._under_way: list[Post] = []
        self._memory = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        self._counts = [memoryview(m)[:8].cast("q") for m in maps]
        self._posted, self._unread = 0, set[int]()  # large messages
        self._selector = selectors.DefaultSelector()
        for i, stream in streams.items():
            stream.setblocking(False)
            self._selector.register(stream, selectors.EVENT_READ, i)
        weakref.finalize(self, _close, self._selector, list(streams.values()))

    def has_room(self, size: int) -> bool:
        """Whether a message of so many bytes can be posted: the same answer on all ranks, which post and read alike."""
        return size <= INLINE or (size <= SLOT and min(self._unread, default=self._posted) > self._posted - SLOTS)

    @property
    def is_clear(self) -> bool:
        """Whether this rank has read every large message, so that turns may have all slots: alike on all ranks, too."""
        return not self._unread

    def take_turns(self, turns: Iterable[Turn]) -> None:
        """Messages one after the other, the same turns on all ranks; each is taken before the last slots are needed."""
        ahead: deque[tuple[Post, Turn]] = deque()
        for turn in turns:
            if len(ahead) == SLOTS:
                _finish(*ahead.popleft())
            ahead.append((self.post(turn.own, turn.sizes), turn))
        while ahead:
            _finish(*ahead.popleft())

    # ---- sending ---------------------------------------------------------------------------------------------------

    def post(self, x: Tensor, sizes: Sequence[int] | None = None, rows: bool = False) -> Post:
        """Give `x` to everybody. `sizes`: bytes of each rank's, where they differ. `rows`: row i of x is for rank i."""
        if sizes is None:
            sizes = [x.numel() * x.element_size()] * self.size
        parts = [size // self.size for size in sizes] if rows else sizes
        if max(sizes) > INLINE:
            post = Post(self, parts, self._write(x), x, self.index * parts[self.index] if rows else 0)
            said: list[bytes | memoryview] = [b""] * self.size
        else:
            data = x.detach().reshape(-1).view(torch.uint8).clone()  # numpy() takes a storage's right to be resized
            each = list(data.view(self.size, -1)) if rows else [data] * self.size
            post = Post(self, parts, None, each[self.index])
            said = [part.numpy().data for part in each]
        for i in self._streams:
            self._send(i, b"".join((parts[self.index].to_bytes(HEADER, "little"), said[i])))
        self._under_way.append(post)
        return post

    def _write(self, x: Tensor) -> int:
        """Into the next slot, once everybody has read what it held; the number of the message."""
        number, until = self._posted, time.monotonic() + self.timeout
        while (late := self._behind(number - SLOTS)) is not None:
            self._pull(TURN_SECONDS)
            self._check(late, until, "a message is still unread")
        start = FRONT + number % SLOTS * SLOT
        size = x.numel() * x.element_size()
        self._memory[self.index][start : start + size].view(x.dtype).view(x.shape).copy_(x.detach())
        self._posted += 1
        self._unread.add(number)
        return number

    def _behind(self, number: int) -> int | None:
        """A rank that has not read the large message `number`. Each count is looked at once: it may grow meanwhile."""
        return next((i for i in self._streams if self._counts[i][0] <= number), None)

    def _send(self, to: int, data: bytes) -> None:
        rest, until = memoryview(data), time.monotonic() + self.timeout
        while len(rest):
            try:
                rest = rest[self._streams[to].send(rest) :]
            except BlockingIOError:  # the other one is not reading: perhaps its own sends wait to be read
                self._pull(TURN_SECONDS)
                self._check(to, until, "nothing more can be sent")
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost(to) from None

    # ---- receiving -------------------------------------------------------------------------------------------------

    def arrived(self, post: Post, until: float | None) -> bool:
        """Take messages in their order up to this one; without a deadline only what is here already."""
        while post in self._under_way:
            first = self._under_way[0]
            self._compare(first.sizes)
            need = [HEADER] * self.size if first.number is not None else [HEADER + size for size in first.sizes]
            missing = [i for i, inbox in self._inbox.items() if len(inbox) < need[i]]
            if not missing:
                self._take(first, need)
                continue
            came = self._pull(0.0 if until is None else min(max(0.0, until - time.monotonic()), LOOK_SECONDS))
            if until is None and not came:
                return False
            for i in missing:
                if until is not None and len(self._inbox[i]) < need[i]:
                    self._check(i, until, "nothing came")
        return True

    def _compare(self, sizes: Sequence[int]) -> None:
        """The next message of every rank is of the size that is expected, as far as they are here."""
        for i, inbox in self._inbox.items():
            size = int.from_bytes(inbox[:HEADER], "little")
            if len(inbox) >= HEADER and size != sizes[i]:
                apart = f"rank {i} of {self.size} sent {size} bytes where this rank expects {sizes[i]}"
                raise RuntimeError(f"ranks have come apart: {apart}; one of them does something that others do not")

    def _take(self, post: Post, need: Sequence[int]) -> None:
        for i, inbox in self._inbox.items():
            data = inbox[HEADER : need[i]]
            del inbox[: need[i]]
            if post.number is None:
                post.parts_here[i] = (
                    torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
                )
        self._under_way.pop(0)

    def _pull(self, seconds: float) -> bool:
        """Read what the streams have, waiting so long for the first of it; whether there was anything."""
        found = self._selector.select(seconds) if self._selector.get_map() else []
        for key, _ in found:
            try:
                data = self._streams[key.data].recv(READ_BYTES)
            except ConnectionResetError:
                data = b""
            if data:
                self._inbox[key.data] += data
            else:
                self._ended.add(key.data)
                self._selector.unregister(key.fileobj)
        return bool(found)

    def _check(self, rank: int, until: float, what: str) -> None:
        if rank in self._ended:
            raise self._lost(rank)
        if time.monotonic() > until:
            late = f"rank {rank} of {self.size} that met in memory is late"
            raise RuntimeError(f"{what} after {self.timeout:g} s: {late}")

    def _lost(self, rank: int) -> RuntimeError:
        return RuntimeError(f"Connection closed by peer: rank {rank} of {self.size} that met in memory has ended")

    # ---- slots -----------------------------------------------------------------------------------------------------

    def read(self, number: int, start: int, sizes: Sequence[int]) -> list[Tensor]:
        """A large message where it lies."""
        at = FRONT + number % SLOTS * SLOT + start
        return [memory[at : at + size] for memory, size in zip(self._memory, sizes, strict=True)]

    def was_read(self, number: int) -> None:
        """Say so: this rank has read every message before the first that it has not."""
        self._unread.discard(number)
        self._counts[self.index][0] = min(self._unread, default=self._posted)


def _close(selector: selectors.BaseSelector, streams: list[socket.socket]) -> None:
    selector.close()
    for stream in streams:
        stream.close()


# ---- meeting -------------------------------------------------------------------------------------------------------


def meet(index: int, size: int, exchange: Callable[[bytes], list[bytes]], timeout: float) -> Line | None:
    """The line of `size` ranks; None where they cannot meet in memory. All call it; `exchange` takes
    this rank's 32 bytes and gives those of all.
    """
    name = os.urandom(16)
    listener = _listener(name) if supported() else None
    cards = exchange((os.urandom(16) if listener is None else place()) + name)
    if listener is None or len({card[:16] for card in cards}) > 1:
        return None
    with listener:
        return _connect(index, [card[16:] for card in cards], listener, timeout)


def _listener(name: bytes) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(_address(name))
    made.listen(MOST_RANKS)
    return made


def _address(name: bytes) -> bytes:
    return b"\0isotron-" + name.hex().encode()


def _connect(index: int, names: list[bytes], listener: socket.socket, timeout: float) -> Line:
    """Streams to all others: to those before this rank it calls, those after it call. Each end sends its memory."""
    secret = hashlib.sha256(b"".join(names)).digest()  # what only a member knows
    soon = min(timeout, LOOK_SECONDS)
    listener.settimeout(soon)
    own = os.memfd_create("isotron")
    os.ftruncate(own, FRONT + SLOTS * SLOT)
    streams: dict[int, socket.socket] = {}
    memory = {index: own}
    for i in range(index):
        streams[i] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        streams[i].settimeout(soon)
        streams[i].connect(_address(names[i]))
        socket.send_fds(streams[i], [secret + index.to_bytes(4, "little")], [own])
    while len(streams) < len(names) - 1:
        stream, _ = listener.accept()
        stream.settimeout(soon)
        said, descriptors, _, _ = socket.recv_fds(stream, len(secret) + 4, 1)
        if said[: len(secret)] != secret or len(descriptors) != 1:
            stream.close()
            continue
        i = int.from_bytes(said[len(secret) :], "little")
        streams[i], memory[i] = stream, descriptors[0]
        socket.send_fds(stream, [TOKEN], [own])
    for i in range(index):
        memory[i] = socket.recv_fds(streams[i], len(TOKEN), 1)[1][0]
    maps = [mmap.mmap(memory[i], FRONT + SLOTS * SLOT) for i in range(len(names))]
    for descriptor in memory.values():
        os.close(descriptor)
    return Line(index, dict(sorted(streams.items())), maps, timeout)
