"""Runs in which something goes wrong: signals, dead and hanging ranks, numbers that are no numbers, leaks."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from isotron.core.errors import Refused
from isotron.launch import run_local
from isotron.train import loop
from isotron.train.faults import StopSignal
from isotron.train.main import main
from tests.ranks import runs

FAULTY = f"{__name__}:faulty"
ROOT = Path(__file__).parents[2]


def faulty(cfg: Any, run_dir: str, kind: str, rank: int, step: int, launcher: int) -> int:
    """A run in a fresh process in which something happens to one rank before it takes the step after `step`."""
    original = loop.one_step
    mine = int(os.environ["RANK"])
    Path(run_dir, f"pid{mine}").write_text(str(os.getpid()), encoding="utf-8")

    def one_step(run: Any, *rest: Any) -> None:
        if mine == rank and run.state.step == step:
            if kind == "hang":
                time.sleep(1000)
            if kind == "raise":
                raise ValueError("the disk is full")
            to, number = {
                "kill": (os.getpid(), signal.SIGKILL),
                "terminate": (os.getpid(), signal.SIGTERM),
                "terminate the launcher": (launcher, signal.SIGTERM),
                "warn the launcher": (launcher, signal.SIGUSR1),
            }[kind]
            os.kill(to, number)
            time.sleep(0.5)
        original(run, *rest)

    loop.one_step = one_step
    return main(cfg, run_dir)


def run_faulty(cfg: Any, run_dir: Path, kind: str, rank: int, step: int) -> tuple[int, float]:
    """Exit code, and seconds from the fault to the end; no process is left."""
    run_dir.mkdir(exist_ok=True)
    code = run_local(FAULTY, cfg.layout.world, (cfg, str(run_dir), kind, rank, step, os.getpid()))
    last = time.time() - max(p.stat().st_mtime for p in run_dir.glob("metrics.jsonl"))
    pids = [int(p.read_text()) for p in run_dir.glob("pid*")]
    assert len(pids) == cfg.layout.world
    assert not any(Path(f"/proc/{pid}/fd/0").exists() for pid in pids)
    return code, last


@pytest.fixture(scope="module")
def uninterrupted(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Twelve steps at DP2 that nothing happened to, saved at 4, 8 and 12."""
    home = tmp_path_factory.mktemp("whole")
    cfg = runs.config("gpt", dp=2, train_iters=12, save_interval=4, save=str(home))
    assert ranks(2, runs.train, cfg, str(home)) == [0, 0]
    return cfg, home


def goes_on(ranks: Any, cfg: Any, home: Path, whole: Path) -> None:
    """The same command again ends where the uninterrupted run ended, bit for bit."""
    assert ranks(2, runs.train, cfg, str(home)) == [0, 0]
    runs.assert_same(runs.tensors(runs.step_dir(home, 12)), runs.tensors(runs.step_dir(whole, 12)))
    for key in ("loss", "sample_ids"):
        assert runs.lines(home, key) == runs.lines(whole, key)


def test_a_killed_rank_ends_the_job_and_the_run_resumes(
    ranks: Any, tmp_path: Path, uninterrupted: tuple[Any, Path], capfd: Any
) -> None:
    cfg = runs.changed(uninterrupted[0], save=str(tmp_path), load=str(tmp_path))
    code, seconds = run_faulty(cfg, tmp_path, "kill", 1, 10)
    assert code == 137 and seconds < 10
    assert "rank 1 of 2 failed: killed by SIGKILL" in capfd.readouterr().err
    assert (tmp_path / "latest").read_text().strip() == "step_00000008"
    goes_on(ranks, cfg, tmp_path, uninterrupted[1])


def test_the_rank_that_raised_is_named_not_its_peers(tmp_path: Path, capfd: Any) -> None:
    cfg = runs.config("llama", tp=2, pp=2, train_iters=8, save=str(tmp_path))
    code, seconds = run_faulty(cfg, tmp_path, "raise", 3, 2)
    err = capfd.readouterr().err
    assert code == 1 and seconds < 10
    assert "rank 3 of 4 failed: exit code 1" in err and "ValueError: the disk is full" in err, err


@pytest.mark.parametrize("kind", ["terminate", "terminate the launcher", "warn the launcher"])
def test_a_stop_signal_saves_once_on_all_ranks(
    ranks: Any, tmp_path: Path, uninterrupted: tuple[Any, Path], capfd: Any, kind: str
) -> None:
    cfg = runs.changed(uninterrupted[0], save=str(tmp_path), load=str(tmp_path), save_interval=0)
    code, _ = run_faulty(cfg, tmp_path, kind, 1, 5)
    heard = capfd.readouterr()
    assert code == 143 and "failed" not in heard.err, heard.err
    (saved,) = tmp_path.glob("step_*")
    stopped = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "stopped" in line]
    assert [(s["event"], s["step"]) for s in stopped] == [("stopped", int(saved.name[5:]))]
    assert stopped[0]["signal"] == ("SIGUSR1" if kind.startswith("warn") else "SIGTERM")
    assert 6 <= stopped[0]["step"] < 12
    goes_on(ranks, cfg, tmp_path, uninterrupted[1])


def told(launcher: int, numbers: list[int], listens: bool, home: str) -> int:
    """Ranks of which the first signals the launcher; with `listens` they need a second to save."""
    with contextlib.ExitStack() as stack:
        if listens:
            stack.enter_context(StopSignal())
        Path(home, os.environ["RANK"]).touch()
        while len(list(Path(home).iterdir())) < 2:
            time.sleep(0.05)
        for number in numbers if os.environ["RANK"] == "0" else []:
            os.kill(launcher, number)
            time.sleep(0.3)
        time.sleep(1.0 if listens else 100.0)
        return 143


@pytest.mark.parametrize(
    ("numbers", "listens", "code"),
    [
        ([signal.SIGTERM], False, 143),  # a signal before anybody listens
        ([signal.SIGUSR1, signal.SIGTERM], True, 143),  # a scheduler's warning, then its end, while ranks save
        ([signal.SIGTERM, signal.SIGTERM], True, 137),  # somebody insists
    ],
)
def test_signals_to_the_launcher(tmp_path: Path, capfd: Any, numbers: list[int], listens: bool, code: int) -> None:
    assert run_local(f"{__name__}:told", 2, (os.getpid(), numbers, listens, str(tmp_path))) == code
    said = capfd.readouterr().err
    assert ("interrupted twice (SIGTERM and SIGTERM): rank" in said) == (code == 137) and "failed" not in said


def test_a_hanging_rank_is_ended_by_the_watchdog(tmp_path: Path, capfd: Any) -> None:
    cfg = runs.config("gpt", dp=2, train_iters=6, save=str(tmp_path), stuck_after_s=4.0)
    code, seconds = run_faulty(cfg, tmp_path, "hang", 1, 3)
    assert code == 75 and seconds < 4 + 10
    err = capfd.readouterr().err
    assert "no progress for 4 s, after step 3" in err and "failed: exit code 75" in err
    assert "time.sleep" in err or "in one_step" in err  # the stack that tells why
    assert sorted(runs.lines(tmp_path)) == [1, 2, 3]
    assert (
        "rank 0 waits in comm." in err and "rank 1 is in no collective" in err and "the others wait for rank 1" in err
    )
    assert "sleep" in (tmp_path / "stacks" / "rank_00001.txt").read_text() or "faulty" in err


def test_the_command_stops_at_a_signal_and_goes_on_with_the_same_words(tmp_path: Path) -> None:
    words = (
        f"train --mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 131 --seq-length 16 "
        f"--tp 2 --global-batch-size 2 --save {tmp_path} --load {tmp_path} --eval-iters 0 --device cpu --lr 1e-2 "
        f"--lr-decay-style linear --min-lr 1e-3"
    ).split()
    command = [sys.executable, "-m", "isotron", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--train-iters", "100000"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_text().count('"loss"') < 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)  # and to the whole group, as `timeout` does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and b"failed" not in err, err
    (saved,) = tmp_path.glob("step_*")
    stopped = int(saved.name[5:])
    more = [*command, "--train-iters", str(stopped + 4)]
    done = subprocess.run(more, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(runs.lines(tmp_path)) == list(range(1, stopped + 5))
    rates = runs.lines(tmp_path, "lr")
    # the decay ends with this run, not where the first would have; the last step is one update before the end
    assert rates[stopped + 4] == pytest.approx(1e-3 + 9e-3 / (stopped + 4))
    assert (tmp_path / "latest").read_text().strip() == f"step_{stopped + 4:08d}"


# ---- numbers that are no numbers -----------------------------------------------------------------------------------


def poisoned(cfg: Any, run_dir: str, steps: list[int]) -> int:
    """A run in which the last rank's weights are NaN during some steps; the exit code."""
    original, count = loop.train_step, iter(range(1, 10**6))

    def train_step(model: Any, *rest: Any, **named: Any) -> Any:
        model.wait_weights()
        flat = list(model.stages.values())[-1].flat
        before = flat.weights.clone()
        hurt = next(count) in steps and model.mesh.rank == model.mesh.size - 1
        if hurt:
            flat.weights.fill_(math.nan)
        result = original(model, *rest, **named)
        if hurt:
            assert torch.isnan(flat.weights).all()
            flat.weights.copy_(before)
        return result

    loop.train_step = train_step
    try:
        return runs.train(cfg, run_dir)
    finally:
        loop.train_step = original


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_steps_without_numbers_are_skipped_by_all_and_counted(ranks: Any, tmp_path: Path, layout: Any) -> None:
    cfg = runs.config("llama", train_iters=6, save=str(tmp_path), check_interval=1, **layout)
    assert ranks(2, poisoned, cfg, str(tmp_path), [3, 4]) == [0, 0]
    flags = runs.lines(tmp_path, "skipped")
    assert [flags[s] for s in range(1, 7)] == [False, False, True, True, False, False]
    assert runs.lines(tmp_path)[3] is None and math.isfinite(runs.lines(tmp_path)[6])
    assert runs.lines(tmp_path, "sample_ids")[6] == [20, 23]
    meta = runs.Source(runs.step_dir(tmp_path, 6)).manifest.meta
    assert (meta["skipped"], meta["updates"], meta["consumed_samples"]) == (2, 4, 24)
    assert all(bool(torch.isfinite(t).all()) for t in runs.tensors(runs.step_dir(tmp_path, 6)).values())


def test_a_run_without_numbers_ends(ranks: Any, tmp_path: Path) -> None:
    cfg = runs.config("llama", tp=2, train_iters=40, save=str(tmp_path), save_interval=2)
    with pytest.raises(Refused) as caught:
        ranks(2, poisoned, cfg, str(tmp_path), list(range(3, 41)))
    assert caught.value.exit_code == 1
    (problem,) = caught.value.problems
    assert problem.asked == "training on after step 22"
    assert "the last 20 steps were skipped" in problem.case and "resume from a checkpoint" in problem.fix
    assert sorted(runs.lines(tmp_path)) == list(range(1, 23))


# ---- what a run keeps ----------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> tuple[int, int]:
    """Number and bytes of tensors that are alive."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    return len(found), sum(t.numel() * t.element_size() for t in found)


def watched(cfg: Any, run_dir: str) -> tuple[list[int], list[tuple[int, int]]]:
    """A run: resident bytes after each save, live tensors after each step."""
    sizes, alive = [], []
    gc.freeze()  # what was there before is not looked at after every step
    step, save = loop.one_step, loop.save

    def one_step(run: Any, *rest: Any) -> None:
        step(run, *rest)
        run.state.model.wait_weights()
        alive.append(live_tensors())

    def saving(run: Any) -> None:
        save(run)
        sizes.append(resident())

    loop.one_step, loop.save = one_step, saving
    try:
        assert runs.train(cfg, run_dir) == 0
    finally:
        gc.unfreeze()
        loop.one_step, loop.save = step, save
    return sizes, alive


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}])
def test_steps_and_saves_leave_nothing_behind(ranks: Any, tmp_path: Path, layout: Any) -> None:
    larger = {"hidden_size": 256, "seq_length": 64, "max_position_embeddings": 64, "dtype": "bfloat16"}
    cfg = runs.config("gpt", train_iters=12, save=str(tmp_path), save_interval=1, keep_last=2, **larger, **layout)
    for sizes, alive in ranks(2, watched, cfg, str(tmp_path)):
        assert sizes[9] <= 1.05 * sizes[1], sizes
        # two steps' batches lie ready at most: a few tensors more or less, and no weights, gradients or activations
        numbers, amounts = zip(*alive[2:-2], strict=True)
        assert max(numbers) - min(numbers) <= 24, numbers
        assert max(amounts) - min(amounts) <= 8 * 64 * 4 * 8, amounts
