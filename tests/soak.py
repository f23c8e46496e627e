"""A run that everything happens to ends with the weights of a run that nothing happened to.

    python -m tests.soak [--steps 200] [--seed 1] [--minutes 0] [--home DIR]

Four processes train in float64; faults strike at random steps and ranks: a rank is killed before a step or while a
checkpoint is being written, hangs, is told to stop, finds the disk full, computes a NaN once, has a bit of a weight
flipped; SIGKILL, SIGTERM and SIGSTOP come from outside at any moment, also while a checkpoint is written or processes
start; between attempts bits of the newest checkpoint's files are flipped, and a node's own directory is lost. Every
attempt resumes in a random layout, often with fewer ranks, from the newest of the run's and the nodes' directories.

In the end the weights are compared with those of one process that trained undisturbed, to 1e-9, and with those of a run
that is led through the same layouts without any fault, bit for bit; the log must hold every sample exactly once, in
order; no process may be left behind by any attempt. `--minutes` repeats with other seeds until the time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from isotron.config.check import finish
from isotron.config.schema import RunConfig, changed
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.locate import steps, verify_files
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.core.models.llama_config import LlamaConfig
from isotron.launch import run_local
from tests.soak_lineage import Lineage
from tests.soak_strikes import SIGNALS, Striker, started

MAIN = "isotron.train.main:main"
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2}, {"dp": 4, "micro_batch_size": 1}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2},
    {"dp": 2}, {"dp": 2, "zero": 0}, {"pp": 4}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "pp": 2, "zero": 0},
)  # fmt: skip
INSIDE = ("kill", "kill-save", "term", "hang", "diskfull", "glitch", "bitflip")
BETWEEN = ("flip a file", "lose a node")
FAULTS = (*INSIDE, *BETWEEN, *SIGNALS, *SIGNALS)
EXPECTED = {0, 1, 75, 137, 143}  # done, refused by a check, stuck, killed, stopped
TOLERANCE = 1e-9
SAVE_EVERY, NEAR_EVERY, STUCK_S, REACH, FAR = 4, 3, 5.0, 9, 40


def config(total: int, **leaves: Any) -> RunConfig:
    """Four samples of 16 tokens a step."""
    usual = {
        "mock_data": True, "tokenizer_type": "NullTokenizer", "seq_length": 16, "micro_batch_size": 2,
        "global_batch_size": 4, "train_iters": total, "lr": 1e-2, "eval_iters": 0, "tensorboard": False,
        "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, "device": "cpu", "dtype": "float64", "dp": 1,
        "log_interval": 10**6, "check_interval": 1, "stuck_after_s": STUCK_S,
    }  # fmt: skip
    model = LlamaConfig(4, 32, 4, 2, ffn_hidden_size=48, vocab_size=131)
    return finish(changed(RunConfig(model=model), **{**usual, **leaves}))


@dataclass
class Tally:
    """What happened: faults by kind, attempts by exit code, steps done twice."""

    faults: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    redone: int = 0
    attempts: int = 0
    steps: int = 0

    def add(self, other: Tally) -> None:
        """Count another soak too."""
        self.faults += other.faults
        self.codes += other.codes
        self.redone += other.redone
        self.attempts += other.attempts
        self.steps += other.steps


@dataclass
class Soak:
    """One run of `total` steps, its dice, and what has happened to it so far."""

    total: int
    home: Path
    dice: random.Random
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.run, self.near = self.home / "run", self.home / "near"
        self.run.mkdir()
        self.near.mkdir()
        self.lineage = Lineage((self.run, self.near))

    def attempt(self, layout: dict[str, Any], fault: str, reached: int) -> int:
        """One start of the command, in which `fault` happens soon; the exit code."""
        if fault == "bitflip" and layout.get("dp", 1) == 1:
            layout = {"dp": 2, "zero": self.dice.choice((0, 1))}  # without a copy elsewhere nobody can see it
        cfg = config(self.total, **layout, **self._leaves())
        cfg = changed(cfg, inject=self._faults(fault, reached, cfg.layout.world))
        for mark in (self.run / "injected").glob("*"):  # the same fault may come again at another attempt
            mark.unlink()
        self.tally.attempts += 1
        log = self.home / f"attempt-{self.tally.attempts}.log"
        pids: list[int] = []
        striker = Striker(fault, self.run, self.near, self.dice, pids) if fault in SIGNALS else None
        with quiet(log), started(pids), striker.watching() if striker else contextlib.nullcontext():
            print(f"{layout} {fault} {cfg}")
            try:
                code = run_local(MAIN, cfg.layout.world, (cfg, str(self.run)))
            except Exception as error:  # what a check refuses is raised here
                print(error)
                code = int(getattr(error, "exit_code", 99))
        if striker is not None and striker.struck:
            self.tally.faults[f"{fault} while {striker.struck}"] += 1
        self.tally.codes[code] += 1
        begun = self.lineage.attempt(layout, log.read_text(errors="replace"))
        self.tally.redone += max(0, reached - begun) if begun or not reached else 0
        return code

    def _leaves(self) -> dict[str, Any]:
        dice = self.dice
        return {
            "save": str(self.run), "load": str(self.run), "save_interval": SAVE_EVERY, "keep_last": 2, "rerun": True,
            "async_save": dice.random() < 0.7, "on_save_failure": dice.choice(("stop", "continue")),
            "local_save": str(self.near), "local_save_interval": NEAR_EVERY, "local_save_ranks": dice.choice((1, 2)),
        }  # fmt: skip

    def _faults(self, fault: str, reached: int, world: int) -> tuple[str, ...]:
        """What this attempt does to itself: the fault, and a stop after what it survives."""
        if not fault:
            return ()
        dice, total = self.dice, self.total
        step = min(reached + dice.randint(1, REACH), total)
        if fault in ("kill-save", "diskfull"):
            step = min(-(-step // SAVE_EVERY) * SAVE_EVERY, total)
        own = (f"{fault}@{step}:{dice.randrange(world)}",) if fault in INSIDE else ()
        if fault == "flip a file":
            self.tally.faults[fault] += flip_file(self.run, dice)
        elif fault == "lose a node":
            nodes = sorted(self.near.glob("node_*"))
            shutil.rmtree(dice.choice(nodes)) if nodes else None
            self.tally.faults[fault] += bool(nodes)
        elif own:
            self.tally.faults[fault] += 1
        end = min(step + (FAR if fault in SIGNALS else dice.randint(1, 4)), total)
        return *own, f"term@{end}:{dice.randrange(world)}"


def soak(total: int, seed: int, home: Path, kinds: tuple[str, ...] = FAULTS) -> Tally:
    """Train `total` steps through faults; raises AssertionError where the end is not that of an undisturbed run."""
    dice = random.Random(seed)
    with quiet(home / "reference.log"):
        assert (
            run_local(
                MAIN, 1, (config(total, save=str(home / "reference"), stuck_after_s=0.0), str(home / "reference"))
            )
            == 0
        )
    job, waiting = Soak(total, home, dice), dice.sample(kinds, len(kinds))
    code = -1
    while code != 0:
        reached, layout = last_step(job.run), dict(dice.choice(LAYOUTS))
        if not waiting and reached < total - REACH:
            waiting = dice.sample(kinds, len(kinds))
        fault = waiting.pop() if waiting and reached < total - 2 else ""
        code = job.attempt(layout, fault, reached)
        assert code in EXPECTED, f"attempt {job.tally.attempts} ({fault or 'no fault'}, {layout}) ended with {code}"
    job.tally.steps = total
    compare(home / "reference", job.run, total)
    replay(job, home / "replay")
    return job.tally


def replay(job: Soak, home: Path) -> None:
    """The same layouts from the same steps on, without faults: the same bits."""
    segments = job.lineage.chains[-1]
    ends = [*(start for start, _ in segments[1:]), job.total]
    for (_, layout), end in zip(segments, ends, strict=True):
        stop = (f"term@{end}:0",) if end < job.total else ()
        cfg = changed(config(job.total, **layout, save=str(home), load=str(home), stuck_after_s=0.0), inject=stop)
        with quiet(home.with_suffix(".log")):
            code = run_local(MAIN, cfg.layout.world, (cfg, str(home)))
        assert code == (143 if stop else 0), f"the replay of {layout} up to step {end} ended with {code}"
    a, b = (tensors(where / f"step_{job.total:08d}") for where in (job.run, home))
    differing = [n for n in a if not torch.equal(a[n], b[n])]
    assert not differing, f"not the bits of the same layouts without faults: {differing}"


def flip_file(run: Path, dice: random.Random) -> bool:
    """One bit of one file of the newest checkpoint, or of the pointer; never of the only one that is whole."""
    found = [s for s in steps(run) if whole_bytes(s)]
    if len(found) < 2:
        return False
    files = [*(f for f in found[0].iterdir() if f.is_file() and f.stat().st_size), run / "latest"]
    file = dice.choice(files)
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)
    return True


def whole_bytes(step: Path) -> bool:
    """Whether every byte of a checkpoint is as it was written."""
    try:
        verify_files(step)
    except Refused:
        return False
    return True


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Everything that this process and its children write goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("w") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, handle in enumerate(kept, 1):
                os.dup2(handle, number)
                os.close(handle)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Whole lines of the log."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(run: Path) -> int:
    """The last step that was logged."""
    return max((line["step"] for line in metrics(run) if "loss" in line), default=0)


def tensors(step: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    source, found = Source(step), {}
    for name in source.names():
        dtype, shape = source.info(name)
        found[name] = torch.empty(shape, dtype=dtype)
        source.read(name, whole(shape), found[name])
    source.close()
    return found


def compare(reference: Path, run: Path, total: int) -> None:
    """Weights and optimizer state to `TOLERANCE`, and every sample once."""
    ids = [(line["step"], line["sample_ids"]) for line in metrics(run) if "loss" in line]
    assert ids == [(s, [4 * s - 4, 4 * s - 1]) for s in range(1, total + 1)], "samples were seen twice or not at all"
    a, b = (tensors(home / f"step_{total:08d}") for home in (reference, run))
    assert sorted(a) == sorted(b)
    scale = max(float(t.abs().max()) for name, t in a.items() if "/" not in name)
    worst = max((float((a[n] - b[n]).abs().max()), n) for n in a)
    assert worst[0] <= TOLERANCE * scale, f"{worst[1]} differs by {worst[0]:.3g} of {scale:.3g}"


def report(tally: Tally) -> None:
    """The counts, in words."""
    print(f"  faults {sum(tally.faults.values())}, all survived: {dict(sorted(tally.faults.items()))}")
    print(f"  {tally.attempts} attempts, exit codes {dict(sorted(tally.codes.items()))}")
    print(f"  {tally.steps} steps, {tally.redone} of them done twice", flush=True)


def main() -> int:
    """Soak as the command line says, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--home", default=None)
    args = parser.parse_args()
    end, seed, everything = time.monotonic() + 60 * args.minutes, args.seed, Tally()
    if args.home:
        Path(args.home).mkdir(parents=True, exist_ok=True)
    while True:
        home = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-", dir=args.home))
        started_at = time.monotonic()
        tally = soak(args.steps, seed, home)
        everything.add(tally)
        print(f"seed {seed}: {time.monotonic() - started_at:.0f} s, in {home}")
        report(tally)
        seed += 1
        if time.monotonic() >= end:
            break
    print("in all:")
    report(everything)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
