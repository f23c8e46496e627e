"""The pool: results by rank, failures that name their rank, dead and late workers, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from isotron.core.errors import Refused, refuse
from isotron.launch import Pool, RanksFailed, RanksLate, pool


def total() -> float:
    import torch
    import torch.distributed as dist

    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return float(x[0])


def echo(tensor):
    return tensor + 1


def fail_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("a number that is wrong")


def fail_while_others_wait() -> float:
    fail_on(1)
    return total()


def refuse_all() -> None:
    raise refuse("--tp 3", "heads do not divide", "--tp 2", exit_code=2)


def refuse_rank_zero() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        refuse_all()


def die_on(rank: int) -> float:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return total()


def sleep_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(60)


def subgroups() -> float:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1], use_local_synchronization=True), dist.new_group([0, 1])]
    x = torch.ones(1)
    for group in groups:
        dist.all_reduce(x, group=group)
    return float(x)


def leave_a_mess() -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "1"


def state() -> tuple[object, ...]:
    import torch

    mess = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), "LEFT_BEHIND" in os.environ
    return *(str(x) for x in mess), torch.rand(1).item()


def unpicklable():
    return lambda: 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_reduce(ranks, world):
    assert ranks(world, total) == [sum(range(1, world + 1))] * world


def test_tensors_travel_both_ways(ranks):
    import torch

    results = ranks(2, echo, torch.arange(3.0))
    assert all(torch.equal(result, torch.arange(3.0) + 1) for result in results)


def test_calls_reuse_the_workers(ranks):
    ranks(2, total)
    before = pool(2).pids
    ranks(2, total)
    assert pool(2).pids == before


def test_failure_names_rank_and_traceback(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(2, fail_on, 1)
    assert list(caught.value.failures) == [1]
    assert "--- rank 1 ---" in str(caught.value) and "a number that is wrong" in str(caught.value)
    assert "fail_on" in str(caught.value)


def test_one_rank_fails_while_others_wait(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(2, fail_while_others_wait)
    assert "a number that is wrong" in caught.value.failures[1]
    assert time.monotonic() - start < 60  # not the minutes that a collective may wait
    assert ranks(2, total) == [3.0, 3.0]


def test_refused_comes_back_as_itself_and_once(ranks):
    ranks(2, total)
    before = pool(2).pids
    with pytest.raises(Refused) as caught:
        ranks(2, refuse_all)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].asked == "--tp 3"
    assert pool(2).pids == before
    with pytest.raises(Refused):
        ranks(2, refuse_rank_zero)
    assert ranks(2, total) == [3.0, 3.0]


def test_dead_worker_is_detected_and_the_pool_rebuilt(ranks):
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks(3, die_on, 2)
    assert ranks(3, total) == [6.0] * 3


def test_worker_killed_between_calls(ranks):
    ranks(2, total)
    os.kill(pool(2).pids[1], signal.SIGKILL)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks(2, total)
    assert ranks(2, total) == [3.0, 3.0]


def test_late_worker(ranks):
    with pytest.raises(RanksLate, match="rank 0") as caught:
        ranks(2, sleep_on, 0, timeout=1.0)
    assert isinstance(caught.value, TimeoutError)
    assert ranks(2, total) == [3.0, 3.0]


def test_groups_do_not_outlive_the_call(ranks):
    for _ in range(3):
        assert ranks(2, subgroups) == [4.0, 4.0]


def test_state_is_reset_between_calls(ranks):
    fresh = ranks(2, state)
    ranks(2, leave_a_mess)
    assert ranks(2, state) == fresh
    assert fresh[0][:4] == ("torch.float32", "True", "1", "False")


def test_functions_that_cannot_travel_are_refused(ranks):
    with pytest.raises(Refused, match="top level"):
        ranks(2, lambda: 1)


def test_result_that_cannot_travel_is_a_failure(ranks):
    with pytest.raises(RanksFailed, match="pickle"):
        ranks(2, unpicklable)


def test_close_leaves_no_process():
    mine = Pool(2)
    mine.run(total)
    pids = mine.pids
    mine.close()
    assert not any(alive(pid) for pid in pids)


SCRIPT = """
import os, sys
from isotron.launch import pool
from tests.ranks.test_launch import total
pool(2).run(total)
print(*pool(2).pids, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["killed", "normal"])
def test_no_orphan_when_the_parent_ends(end):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, end], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode == 0) == (end == "normal"), done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupted_call_leaves_no_answer_behind(ranks, monkeypatch):
    ranks(2, total)

    def interrupt(self, deadline):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks(2, echo, 1)
    assert ranks(2, total) == [3.0, 3.0]
