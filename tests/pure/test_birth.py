"""What processes that train are born with: set once at their start, left alone where the user has set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isotron import birth

NAMES = (birth.VARIABLE, birth.WAITING)
SAY = f"import os; from isotron import birth; birth.start_again(); print(os.getpid(), *map(os.environ.get, {NAMES}))"
no_heap = birth.VARIABLE not in birth.settings({})
has_glibc = pytest.mark.skipif(no_heap, reason="there is no glibc here")


@pytest.mark.parametrize("name", [birth.VARIABLE, birth.PLAIN, "MALLOC_ARENA_MAX"])
def test_a_heap_that_the_user_has_set_is_left_alone(name: str) -> None:
    assert birth.settings({name: "1"}) == {birth.WAITING: "passive"}


def test_threads_wait_without_spinning_unless_the_user_says_otherwise() -> None:
    assert birth.settings({birth.WAITING: "active", birth.PLAIN: "1"}) == {}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_no_heap_is_set_where_there_is_no_glibc(platform: str) -> None:
    assert birth.settings({}, platform) == {birth.WAITING: "passive"}


@has_glibc
def test_a_process_starts_again_once_and_stays_the_same_process() -> None:
    plain = {k: v for k, v in os.environ.items() if k not in NAMES and not k.startswith("MALLOC_")}
    process = subprocess.Popen([sys.executable, "-c", SAY, "--word"], stdout=subprocess.PIPE, text=True, env=plain)
    out, _ = process.communicate(timeout=60)
    assert out.split() == [str(process.pid), birth.TUNABLES, "passive"]
