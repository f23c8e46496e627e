"""Jobs that their launcher starts again: they resume by themselves, also with fewer ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isotron.commands.train import going_on
from isotron.launch import run_local, started_again
from tests import soak

WORDS = """
--family llama --num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 48
--vocab-size 131 --mock-data --tokenizer-type NullTokenizer --seq-length 16 --micro-batch-size 2 --global-batch-size 4
--lr 1e-2 --eval-iters 0 --no-tensorboard --make-vocab-size-divisible-by 8 --ddp-bucket-size 3000 --device cpu
--dtype float64 --save-interval 5 --keep-last 2
"""
TOTAL = 150


def test_a_job_that_is_started_again_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    assert not started_again({}) and not started_again({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert started_again({"TORCHELASTIC_RESTART_COUNT": "1"}) and started_again({"SLURM_RESTART_COUNT": "2"})
    begins = soak.config(9, save=str(tmp_path / "run"))
    tunes = soak.config(9, save=str(tmp_path / "run"), load=str(tmp_path / "model"), finetune=True)
    assert going_on(begins, False) == begins and going_on(tunes, True) == tunes  # nothing is saved yet
    assert going_on(begins, True).checkpoint.load == str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("step_00000003\n")
    again = going_on(tunes, True).checkpoint
    assert (again.load, again.finetune) == (str(tmp_path / "run"), False)


def node(port: int, log: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """One machine's torchrun, with one rank; it takes part in a job of one or two machines."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job"]
    meeting += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"]
    with log.open("wb") as out:
        command = [*launcher, *meeting, "-m", "isotron", "train", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)


def wait_for(what: str, done: object, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_lost_machine_costs_steps_and_no_more(tmp_path: Path) -> None:
    """Two machines of one rank; one goes away with its launcher: the other resumes alone, the global batch is kept."""
    run, reference = tmp_path / "run", str(tmp_path / "reference")
    assert run_local(soak.MAIN, 1, (soak.config(TOTAL, save=reference), reference)) == 0
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    words = [*WORDS.split(), "--train-iters", str(TOTAL), "--save", str(run)]
    nodes = [node(port, tmp_path / "a.log", words)]
    try:
        time.sleep(1.0)  # the first is host of the meeting place
        nodes.append(node(port, tmp_path / "b.log", words))
        wait_for("a checkpoint", lambda: soak.last_step(run) >= 12)
        for worker in children(nodes[1].pid):
            os.kill(worker, signal.SIGKILL)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        assert nodes[0].wait(120) == 0, (tmp_path / "a.log").read_text()
    finally:
        for each in nodes:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGTERM)
                each.wait(30)
    said = (tmp_path / "a.log").read_text()
    resumed = re.search(r"resumed from \S+ at step (\d+)", said)
    assert "on 2 rank(s)" in said and "on 1 rank(s)" in said and resumed is not None
    assert 10 <= int(resumed[1]) < TOTAL and int(resumed[1]) % 5 == 0
    soak.compare(Path(reference), run, TOTAL)


def children(pid: int) -> list[int]:
    """Processes that another has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
