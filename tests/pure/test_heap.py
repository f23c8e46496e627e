"""The heap of processes that train: set once at their start, left alone where the user has set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isotron import heap

SAY = "import os, sys; from isotron import heap; heap.start_again(); print(os.getpid(), os.environ.get(heap.VARIABLE))"
has_glibc = pytest.mark.skipif(not heap.settings({}), reason="there is no glibc here")


@pytest.mark.parametrize("name", [heap.VARIABLE, heap.PLAIN, "MALLOC_ARENA_MAX"])
def test_a_heap_that_the_user_has_set_is_left_alone(name: str) -> None:
    assert heap.VARIABLE not in heap.settings({name: "1"})


@has_glibc
def test_threads_wait_without_spinning_unless_the_user_says_otherwise() -> None:
    assert heap.settings({})[heap.WAITING] == "passive"
    assert heap.WAITING not in heap.settings({heap.WAITING: "active"})


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_nothing_is_set_where_there_is_no_glibc(platform: str) -> None:
    assert heap.settings({}, platform) == {}


@has_glibc
def test_a_process_starts_again_once_and_stays_the_same_process() -> None:
    plain = {k: v for k, v in os.environ.items() if k != heap.VARIABLE and not k.startswith("MALLOC_")}
    process = subprocess.Popen([sys.executable, "-c", SAY, "--word"], stdout=subprocess.PIPE, text=True, env=plain)
    out, _ = process.communicate(timeout=60)
    assert out.split() == [str(process.pid), heap.TUNABLES]
