"""What a process is born with: the C library's heap, set for tensors, and threads that wait without spinning. PURE.

The tensors of a step are freed and asked for again all the time. As it comes, glibc hands large blocks back to the
system, which clears them page by page when they are touched again, and 4 KiB pages of weights and optimizer state miss
the processor's page tables: here pages have 2 MiB, and memory stays with the process. As they come, OpenMP's threads
spin, and where others want the cores a step takes tens of times as long. All this is read when a process starts: one
that is to have it starts once more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
PLAIN = "ISOTRON_PLAIN_HEAP"  # set to anything: leave the heap as it is
WAITING = "OMP_WAIT_POLICY"
NEVER = 1 << 34  # bytes: no block and no free rest is so large
TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"hugetlb": 1, "mmap_threshold": NEVER, "trim_threshold": NEVER, "top_pad": 1 << 26}.items()
)


def settings(environ: Mapping[str, str], platform: str = sys.platform) -> dict[str, str]:
    """The variables that a new process needs, but nothing that the user has set; a heap only where there is glibc."""
    waits = {} if WAITING in environ else {WAITING: "passive"}
    own = any(name in (VARIABLE, PLAIN) or name.startswith("MALLOC_") for name in environ)
    return waits if own or platform != "linux" or not _has_glibc() else {**waits, VARIABLE: TUNABLES}


def start_again() -> None:
    """This process from its beginning with what it needs, where it has not yet; keeps its number and its files."""
    wanted = settings(os.environ)
    if wanted and sys.executable:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False
