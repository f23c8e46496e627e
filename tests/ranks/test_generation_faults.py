"""A rank that is killed in the middle of an answer ends the command, names itself, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.generation import save_run
from tests.serving import call

pytestmark = pytest.mark.slow


def processes(session: int) -> dict[int, str]:
    """The command lines of a session's living processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line:  # an ended one has none
                    found[int(entry.name)] = line
        except (OSError, ProcessLookupError):
            continue
    return found


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The two ranks, once both are there: what the fork server has made."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        alive = processes(process.pid)
        servers = [pid for pid, line in alive.items() if "forkserver" in line]
        ranks = [pid for pid in servers if _parent(pid) in servers]
        if len(ranks) == 2:
            return sorted(ranks)
        time.sleep(0.1)
    raise AssertionError(processes(process.pid))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "isotron", *words, "--tp", "2", "--device", "cpu"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def gone(process: subprocess.Popen[str], rank: int) -> str:
    """What the command said when it ended because of a killed rank."""
    _, err = process.communicate(timeout=30)
    assert process.returncode == 137 and f"rank {rank} of 2 failed: killed by SIGKILL" in err
    deadline = time.monotonic() + 30
    while processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes(process.pid)
    return err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_generation(rank: int, tmp_path: Path) -> None:
    step = save_run("gpt", tmp_path)
    many = ["--prompt", "5 17", "--n", "60000", "--max-new-tokens", "20", "--temperature", "1"]
    process = started("generate", "--load", str(step), *many)
    try:
        victim = ranks_of(process)[rank]
        time.sleep(5)
        os.kill(victim, signal.SIGKILL)
        assert "Traceback" not in gone(process, rank)
    finally:
        process.kill()
        process.wait()


def test_a_server(tmp_path: Path) -> None:
    """The clients that wait are told that the engine stopped, not that the model is at fault."""
    process = started("serve", "--load", str(save_run("gpt", tmp_path)), "--port", "0", "--json")
    try:
        assert process.stdout is not None
        address = ("127.0.0.1", int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1]))
        body = {"prompt": "5 17", "n": 64, "max_tokens": 30, "temperature": 1, "ignore_eos": True}
        with ThreadPoolExecutor() as clients:
            asked = [clients.submit(call, address, "POST", "/v1/completions", body) for _ in range(4)]
            os.kill(ranks_of(process)[1], signal.SIGKILL)
            replies = [a.result() for a in asked if not a.exception()]
        for status, reply in replies:
            assert status in (200, 503), reply
            assert status == 200 or reply["error"]["type"] == "server_error"
        gone(process, 1)
    finally:
        process.kill()
        process.wait()
