"""Commands on several processes: exit codes, the failing rank's name, signals, threads, worlds from the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection
from types import SimpleNamespace

import pytest

from isotron import supervise
from isotron.core.errors import Refused, refuse
from isotron.launch import World, from_environment, init_distributed, run_local, shutdown
from isotron.supervise import threads_per_process

HERE = __name__
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def reduce_and_print(base: int) -> int:
    import torch
    import torch.distributed as dist

    world = from_environment()
    init_distributed(world, torch.device("cpu"), timeout=60.0)
    x = torch.tensor([base + world.rank])
    dist.all_reduce(x)
    print(f"rank {world.rank}/{world.size} sum {int(x)} threads {torch.get_num_threads()}")
    return 0


def raise_on_one() -> None:
    world = from_environment()
    if world.rank == 1:
        raise ValueError("the disk is full")
    time.sleep(100)


def killed_on_one() -> None:
    if from_environment().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def killed_before_the_collective() -> None:
    import torch
    import torch.distributed as dist

    world = from_environment()
    init_distributed(world, torch.device("cpu"), timeout=60.0)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def sleep_long() -> None:
    time.sleep(100)


def refuse_everywhere() -> None:
    raise refuse("--tp 3", "heads do not divide", "--tp 2", exit_code=2)


def refuse_at_length(count: int) -> None:
    raise refuse("--tp 3", " ".join(["word"] * count), "--tp 2")


def raise_at_length(count: int) -> None:
    raise ValueError("word " * count)


def exit_with(code: int) -> int:
    return code


def save_on_sigterm(path: str) -> int:
    rank = from_environment().rank
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    open(f"{path}/ready{rank}", "w").close()
    while not stop.is_set():
        time.sleep(0.05)
    open(f"{path}/saved{rank}", "w").close()
    return 0


def wait_forever(path: str) -> None:
    with open(f"{path}/pid{from_environment().rank}", "w", encoding="utf-8") as handle:
        handle.write(str(os.getpid()))
    time.sleep(1000)


def test_processes_meet_and_their_output_arrives(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_local(f"{HERE}:reduce_and_print", 2, (10,)) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    threads = threads_per_process(2)
    assert lines == [f"rank {rank}/2 sum 21 threads {threads}" for rank in range(2)]


def test_one_process_runs_in_place():
    assert run_local(f"{HERE}:exit_with", 1, (5,)) == 5
    init_distributed(World(), None)  # a world of one makes no group
    shutdown()


def test_exit_code_comes_back():
    assert run_local(f"{HERE}:exit_with", 2, (7,)) == 7


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("raise_on_one", 1, ["rank 1 of 2 failed: exit code 1", "stopped with it: 0", "the disk is full"]),
        ("killed_on_one", 137, ["rank 1 of 2 failed: killed by SIGKILL"]),
        ("killed_before_the_collective", 137, ["rank 0 of 2 failed: killed by SIGKILL"]),
        ("no_such_function", 1, ["no_such_function"]),
    ],
)
def test_a_failing_rank_ends_all_and_is_named(capfd, function, code, words):
    start = time.monotonic()
    assert run_local(f"{HERE}:{function}", 2) == code
    assert time.monotonic() - start < 30
    err = capfd.readouterr().err
    assert all(word in err for word in words), err


def test_refusals_are_raised_here_once():
    with pytest.raises(Refused) as caught:
        run_local(f"{HERE}:refuse_everywhere", 2)
    assert [p.asked for p in caught.value.problems] == ["--tp 3"]


def test_a_report_larger_than_a_pipe_arrives(capfd):
    with pytest.raises(Refused) as caught:
        run_local(f"{HERE}:refuse_at_length", 2, (200_000,))
    assert len(caught.value.problems[0].case) == 999_999
    assert run_local(f"{HERE}:raise_at_length", 2, (200_000,)) == 1
    assert "word " * 199_999 in capfd.readouterr().err


LAUNCHER = """
import sys
sys.path.insert(0, {root!r})
from isotron.launch import run_local
if __name__ == "__main__":
    sys.exit(run_local("tests.ranks.test_run_local:{function}", 2, ({path!r},)))
"""


def launcher(tmp_path, function: str) -> subprocess.Popen[str]:
    script = tmp_path / "command.py"
    script.write_text(LAUNCHER.format(root=ROOT, function=function, path=str(tmp_path)))
    return subprocess.Popen([sys.executable, str(script)], text=True, stderr=subprocess.PIPE)


def until(done, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.1)
    return done()


def test_sigterm_is_passed_on(tmp_path):
    command = launcher(tmp_path, "save_on_sigterm")
    assert until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    command.send_signal(signal.SIGTERM)
    assert command.wait(timeout=30) == 0, command.stderr.read()
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("at", [0, 1])
def test_a_signal_while_processes_start_is_not_lost(monkeypatch, capfd, number, at):
    start = supervise._start

    def signalled(rank: int, *rest: object) -> supervise.Rank:
        if rank == at:  # it waits for the fork server, which loads torch: seconds in which people press Ctrl-C
            signal.raise_signal(number)
        return start(rank, *rest)

    monkeypatch.setattr(supervise, "_start", signalled)
    began = time.monotonic()
    assert run_local(f"{HERE}:sleep_long", 3) == 128 + number
    assert time.monotonic() - began < 60
    assert f"ended by {number.name}" in capfd.readouterr().err


def deaf(path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait_forever(path)


def test_a_second_interrupt_says_whom_it_killed(tmp_path, capfd):
    files = [tmp_path / f"pid{rank}" for rank in range(2)]

    def interrupt() -> None:
        until(lambda: all(file.exists() and file.read_text() for file in files))
        os.kill(int(files[1].read_text()), signal.SIGSTOP)
        for _ in range(2):
            time.sleep(2 * supervise.SAME_SECONDS)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert run_local(f"{HERE}:deaf", 2, (str(tmp_path),)) == 137
    said = (
        "isotron: interrupted twice (SIGINT and SIGINT): ranks 0, 1 of 2 had not stopped and had to be killed; rank 1 "
    )
    assert capfd.readouterr().err == f"{said}had been suspended (SIGSTOP, Ctrl-Z)\n"


def test_a_rank_that_has_just_ended_is_not_said_to_have_been_killed():
    """Until it is waited for its process is there, and takes signals."""
    ours, theirs = os.pipe()
    process = subprocess.Popen(["true"], pass_fds=[theirs])
    os.close(theirs)  # its own copy is closed as it ends
    try:
        connection.wait([ours])
        with supervise._forwarding([supervise.Rank(0, SimpleNamespace(pid=process.pid, sentinel=ours), None)]) as told:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
        assert told.seen == [signal.SIGINT, signal.SIGTERM] and told.killed == []
    finally:
        process.wait()
        os.close(ours)


def test_no_orphan_when_the_launcher_is_killed(tmp_path):
    command = launcher(tmp_path, "wait_forever")
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    assert until(lambda: all(file.exists() and file.read_text() for file in files))
    command.kill()
    command.wait(timeout=10)
    pids = [int(file.read_text()) for file in files]
    assert until(lambda: not any(os.path.exists(f"/proc/{pid}/fd/0") for pid in pids), seconds=15)


# ---- worlds from the environment -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(3, 8, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 0, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}, World(2, 4, 2, 4)),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "17",
                "SLURM_STEP_NUM_TASKS": "20",
                "SLURM_NTASKS": "99",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
            },
            World(17, 20, 1, 4),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}, None),
    ],
)
def test_worlds(env, world):
    assert from_environment(env) == world


@pytest.mark.parametrize("env", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "one", "WORLD_SIZE": "2"}])
def test_half_a_world_is_refused(env):
    with pytest.raises(Refused, match="RANK and WORLD_SIZE"):
        from_environment(env)


def test_rank_outside_its_world_is_refused():
    with pytest.raises(Refused, match="rank 2 of 2"):
        from_environment({"RANK": "2", "WORLD_SIZE": "2"})


def test_meeting_points():
    from isotron.launch import _meeting_point

    assert _meeting_point({"MASTER_ADDR": "a", "MASTER_PORT": "1234"}) == ("a", 1234)
    slurm = {"SLURM_STEP_NODELIST": "gpu[07-09,12]-ib,x", "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "1"}
    assert _meeting_point(slurm) == ("gpu07-ib", 20042)
    assert _meeting_point({"SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_ID": "1", "MASTER_PORT": "9"}) == ("n1", 9)
    with pytest.raises(Refused, match="MASTER_ADDR"):
        _meeting_point({})


def test_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_per_process(10**6) == 1


def test_windows_is_refused_with_wsl2():
    from isotron.launch import check_platform

    with pytest.raises(Refused, match="WSL2"):
        check_platform("win32")
    check_platform("darwin")


ELASTIC = """
import os, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from isotron.launch import from_environment, init_distributed, shutdown
world = from_environment()
try:
    init_distributed(world, torch.device("cpu"), timeout=60.0)
    x = torch.ones(1)
    dist.all_reduce(x)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0" and world.rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(x)
    print(f"attempt {{attempt}} rank {{world.rank}} sum {{int(x)}}", flush=True)
finally:
    shutdown()
"""


def test_torchrun_restarts(tmp_path):
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC.format(root=ROOT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    # both ranks write to one pipe: their line ends may be swapped
    assert all(done.stdout.count(f"attempt 1 rank {rank} sum 4") == 1 for rank in range(2)), done.stdout
