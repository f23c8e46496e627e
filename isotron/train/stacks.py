"""Where every rank of a machine stands, written down when one of them is stuck.

A signal makes a rank write the stacks of its threads to a file of its own, in C: also when Python itself stands still
in a collective. The rank whose watchdog is first sends it to the others, reads the files, and says which ranks wait in
which collective and which do not: the others wait for those.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from isotron.core.checkpoint.ranks import Ranks

SIGNAL = signal.SIGUSR2
SECONDS = 1.0  # for the others to write
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')


class Stacks:
    """The files of the ranks in `directory`; `peers`: process numbers of the ranks on this machine, by rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.peers: dict[int, int] = {}

    def file(self, rank: int) -> Path:
        """Where a rank writes."""
        return self.directory / f"rank_{rank:05d}.txt"

    @contextlib.contextmanager
    def listening(self, ranks: Ranks) -> Iterator[None]:
        """This rank writes its stacks when it is asked to; every rank enters together, so that all know all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        everyone = ranks.broadcast_json(ranks.gather_json([socket.gethostname(), os.getpid()]))
        here = socket.gethostname()
        self.peers = {rank: pid for rank, (host, pid) in enumerate(everyone) if host == here}
        with self.file(self.rank).open("w", encoding="utf-8") as out:
            faulthandler.register(SIGNAL, file=out, all_threads=True)
            try:
                yield
            finally:
                faulthandler.unregister(SIGNAL)
        if self.file(self.rank).stat().st_size == 0:
            self.file(self.rank).unlink()

    def collect(self) -> str:
        """Asks every rank of this machine, and what they say: one line a rank, and where the stacks are."""
        if not self.peers:
            return ""
        for pid in self.peers.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
        time.sleep(SECONDS)
        lines, idle = [], []
        for rank in self.peers:
            where = collective(self.file(rank))
            lines.append(f"isotron: rank {rank} {f'waits in {where}' if where else 'is in no collective'}")
            idle += [] if where else [rank]
        if idle and len(idle) < len(lines):
            lines.append(f"isotron: the others wait for rank {', '.join(map(str, idle))}")
        return "\n".join([*lines, f"isotron: their stacks are in {self.directory}", ""])


def collective(file: Path) -> str:
    """The collective that a rank's main thread stands in, and who asked for it; "" for none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    main = text.rpartition("hread 0x")[2]  # the main thread is written last
    frames = [(m["file"].replace("\\", "/"), m["name"]) for m in _FRAME.finditer(main)]
    inside = [i for i, (path, _) in enumerate(frames) if path.endswith("isotron/core/comm.py")]
    if not inside:
        return ""
    last = inside[-1]
    caller = frames[last + 1] if last + 1 < len(frames) else ("", "the program")
    return f"comm.{frames[last][1]} of {Path(caller[0]).stem}.{caller[1]}"
