"""A run that everything happens to ends with the weights of a run that nothing happened to.

    python tests/soak.py [--steps 200] [--seed 1] [--minutes 0] [--home DIR]

Four processes train in float64; faults strike at random steps and ranks: a rank is killed before a step or while a
checkpoint is being written, hangs, is told to stop, finds the disk full, computes a NaN once, has a bit of a weight
flipped; between attempts bits of the newest checkpoint's files are flipped. Every attempt resumes in a random layout,
often with fewer ranks. In the end the weights are compared with those of one process that trained undisturbed, and the
log must hold every sample exactly once, in order. `--minutes` repeats with other seeds until the time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
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
from isotron.core.checkpoint.locate import steps
from isotron.core.layout import whole
from isotron.core.models.llama_config import LlamaConfig
from isotron.launch import run_local

MAIN = "isotron.train.main:main"
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2}, {"dp": 4, "micro_batch_size": 1}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2},
    {"dp": 2}, {"dp": 2, "zero": 0}, {"pp": 4}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "pp": 2, "zero": 0},
)  # fmt: skip
FAULTS = ("kill", "kill-save", "term", "hang", "diskfull", "glitch", "bitflip", "flip a file")
EXPECTED = {0, 1, 75, 137, 143}  # done, refused by a check, stuck, killed, stopped
TOLERANCE = 1e-9
SAVE_EVERY, STUCK_S, REACH = 4, 5.0, 9


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
    """What happened: faults by kind, attempts by exit code, steps done twice, files that were flipped and found."""

    faults: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    redone: int = 0
    attempts: int = 0


def soak(total: int, seed: int, home: Path, kinds: tuple[str, ...] = FAULTS) -> Tally:
    """Train `total` steps through faults; raises AssertionError where the end is not that of an undisturbed run."""
    dice, tally = random.Random(seed), Tally()
    with quiet(home / "reference.log"):
        assert run_local(MAIN, 1, (config(total, save=str(home / "reference")), str(home / "reference"))) == 0
    run = home / "run"
    run.mkdir()
    waiting = list(kinds)
    dice.shuffle(waiting)
    while True:
        reached, layout = last_step(run), dict(dice.choice(LAYOUTS))
        if not waiting and reached < total - REACH:
            waiting = list(kinds)
            dice.shuffle(waiting)
        fault = waiting.pop() if waiting and reached < total - 2 else ""
        code = attempt(total, run, layout, fault, reached, dice, tally, home)
        assert code in EXPECTED, f"attempt {tally.attempts} ({fault or 'no fault'}, {layout}) ended with {code}"
        tally.codes[code] += 1
        if code == 0:
            break
    compare(home / "reference", run, total)
    return tally


def attempt(
    total: int,
    run: Path,
    layout: dict[str, Any],
    fault: str,
    reached: int,
    dice: random.Random,
    tally: Tally,
    home: Path,
) -> int:
    """One start of the command, in which `fault` happens soon; the exit code."""
    if fault == "bitflip" and layout.get("dp", 1) == 1:
        layout = {"dp": 2, "zero": dice.choice((0, 1))}  # without a copy elsewhere nobody can see it
    leaves: dict[str, Any] = {**layout, "save": str(run), "load": str(run), "save_interval": SAVE_EVERY, "keep_last": 2}
    leaves |= {"async_save": dice.random() < 0.7, "on_save_failure": dice.choice(("stop", "continue")), "rerun": True}
    cfg = config(total, **leaves)
    if fault:
        step = min(reached + dice.randint(1, REACH), total)
        if fault in ("kill-save", "diskfull"):
            step = min(-(-step // SAVE_EVERY) * SAVE_EVERY, total)
        end = min(step + dice.randint(1, 4), total)  # what the run survives by itself is followed by a stop
        ranks = [dice.randrange(cfg.layout.world) for _ in range(2)]
        own = () if fault == "flip a file" else (f"{fault}@{step}:{ranks[0]}",)
        cfg = changed(cfg, inject=(*own, f"term@{end}:{ranks[1]}"))
        for mark in (run / "injected").glob("*"):  # the same fault may come again at another attempt
            mark.unlink()
        tally.faults[fault] += flip_file(run, dice) if fault == "flip a file" else 1
    tally.attempts += 1
    with quiet(home / f"attempt-{tally.attempts}.log"):
        print(f"{layout} {leaves} {cfg.faults.inject} {fault}")
        try:
            code = run_local(MAIN, cfg.layout.world, (cfg, str(run)))
        except Exception as error:  # what a check refuses is raised here
            print(error)
            code = int(getattr(error, "exit_code", 99))
    tally.redone += max(0, reached - resumed_at(run))
    return code


def flip_file(run: Path, dice: random.Random) -> bool:
    """One bit of one file of the newest checkpoint, or of the pointer; never of the only checkpoint."""
    found = [s for s in steps(run) if (s / "manifest.json").exists()]
    if len(found) < 2:
        return False
    files = [*(f for f in found[0].iterdir() if f.is_file() and f.stat().st_size), run / "latest"]
    file = dice.choice(files)
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)
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


def resumed_at(run: Path) -> int:
    """The step that the last start went on from; what was reached, when no start got that far."""
    starts = [line["step"] for line in metrics(run) if line.get("event") == "start"]
    return starts[-1] if starts else 0


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


def main() -> int:
    """Soak as the command line says, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--home", default=None)
    args = parser.parse_args()
    end, seed, everything = time.monotonic() + 60 * args.minutes, args.seed, Tally()
    while True:
        home = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-", dir=args.home))
        started = time.monotonic()
        tally = soak(args.steps, seed, home)
        everything.faults += tally.faults
        everything.codes += tally.codes
        everything.redone += tally.redone
        everything.attempts += tally.attempts
        print(f"seed {seed}: {args.steps} steps, {time.monotonic() - started:.0f} s, in {home}")
        print(f"  faults {sum(tally.faults.values())}, all survived: {dict(tally.faults)}")
        print(
            f"  attempts {tally.attempts}, exit codes {dict(tally.codes)}, steps done twice {tally.redone}", flush=True
        )
        seed += 1
        if time.monotonic() >= end:
            break
    print(f"in all: {sum(everything.faults.values())} faults, {everything.attempts} attempts, "
          f"{everything.redone} steps done twice; the final weights equal the undisturbed run's")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
