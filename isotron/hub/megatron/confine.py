"""Give up, for the rest of this process, everything but reading files and writing to what is open already. PURE.

For the process that reads pickles. Limits of the system stop growth, forks and files; a network of its own (Linux) has
no way out; a filter of system calls (Linux on x86-64 and arm64) leaves a short list of them, opening files for reading
among them, and answers every other one with "not permitted". Source: seccomp(2), unshare(2), getrlimit(2).
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

# machine -> (its code in filters, open for reading, mapping and protecting memory, calls that are allowed as they are)
# read write close fstat lseek munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64 readv writev sched_yield
# mremap madvise getpid exit fcntl sigaltstack gettid futex getdents64 clock_gettime exit_group newfstatat getrandom
# statx; and on x86-64 stat lstat
MACHINES: dict[str, tuple[int, int, tuple[int, int], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E, 257, (9, 10),
        (0, 1, 3, 4, 5, 6, 8, 11, 12, 13, 14, 15, 17, 19, 20, 24, 25, 28, 39, 60, 72, 131, 186, 202, 217, 228, 231, 262,
         318, 332),
    ),
    "aarch64": (
        0xC00000B7, 56, (222, 226),
        (63, 64, 57, 80, 62, 215, 214, 134, 135, 139, 67, 65, 66, 124, 216, 233, 172, 93, 25, 132, 178, 98, 61, 113, 94,
         79, 278, 291),
    ),
}  # fmt: skip
MEMORY_BYTES, SECONDS, FILES = 16 * 2**30, 900, 64
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000  # write only, read and write, create, truncate, append
_EXECUTABLE = 4
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of the filter
_ALLOW, _DENY = 0x7FFF0000, 0x00050001  # the second: error 1, not permitted


def confine() -> list[str]:
    """Give it up; returns what is in force: "limits", "network", "calls"."""
    in_force = ["limits"] if _limit() else []
    if not sys.platform.startswith("linux"):
        return in_force
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_NET) == 0 or library.unshare(_NEW_USER | _NEW_NET) == 0:
        in_force.append("network")
    machine = MACHINES.get(platform.machine())
    if machine is not None and _filter_calls(library, filter_program(*machine)):
        in_force.append("calls")
    return in_force


def _limit() -> bool:
    try:
        import resource
    except ImportError:  # no such limits here
        return False
    wanted = {"RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": FILES, "RLIMIT_CPU": SECONDS,
              "RLIMIT_AS": MEMORY_BYTES}  # fmt: skip
    for name, most in wanted.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            if name == "RLIMIT_FSIZE":
                return False
    return True


def filter_program(code: int, opening: int, mapping: tuple[int, int], allowed: tuple[int, ...]) -> bytes:
    """The filter: instructions of 8 bytes, read from the top. Jumps count instructions that are skipped."""
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, code), (_RETURN, 0, 0, _DENY), (_LOAD, 0, 0, 0)]
    for call in allowed:
        steps += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    # the third argument of these lies at byte 32
    for call, forbidden in ((opening, _WRITING), *((call, _EXECUTABLE) for call in mapping)):
        steps += [(_EQUAL, 0, 4, call), (_LOAD, 0, 0, 32), (_ANY_BIT, 0, 1, forbidden), (_RETURN, 0, 0, _DENY),
                  (_RETURN, 0, 0, _ALLOW)]  # fmt: skip
    steps.append((_RETURN, 0, 0, _DENY))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _filter_calls(library: ctypes.CDLL, program: bytes) -> bool:
    instructions = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    if library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    return bool(library.prctl(_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(described, len(described)), 0, 0) == 0)
