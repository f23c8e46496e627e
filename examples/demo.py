"""`make demo`: from text to a trained model in a few minutes on two CPU cores.

Every step is one `isotron` command, printed before it runs, so that it can be typed again by hand. The end is a
verdict: the loss on held-out text beside the unigram entropy, which is what a model reaches that only knows how common
each token is. Exit code 0 only if the model is clearly better than that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ("And it came to pass, that", "She was not at all surprised to")
MARGIN = 0.7  # nats per token that the loss must be below the unigram entropy


def main() -> int:
    """Run the steps; returns the exit code."""
    args = _arguments()
    run, began = args.directory, time.monotonic()
    _clear(run)
    train, valid = run / "data" / "train_text_document", run / "data" / "valid_text_document"
    checkpoints = run / "checkpoints"

    say("1. Text to tokens, with a tokenizer that was trained on this text.")
    for part in ("train", "valid"):
        prefix = ["--output-prefix", _short(run / "data" / part)]
        model = ["--tokenizer-model", "assets/demo_tokenizer/tokenizer.json", "--append-eod"]
        isotron("preprocess", "--input", f"assets/text/{part}.jsonl", *prefix, *model)
    entropy = unigram_entropy(train, valid)
    say(f"   Unigram entropy of the held-out text: {entropy:.3f} nats per token.")

    say("2. Train a small LLaMA on 4 processes: every layer split over 2 (TP), the layers dealt to 2 groups (PP).")
    data = ["--data-path", _short(train), "--valid-data-path", _short(valid)]
    isotron("train", "--config", "configs/demo.toml", *data, "--save", _short(checkpoints), *args.first)
    first = last_evaluation(checkpoints)
    say(f"   Held-out loss {first['eval_loss']:.3f}, unigram entropy {entropy:.3f} nats per token.")

    say("3. Go on from the checkpoint in another layout: 2 processes, each with all layers and half of the data (DP).")
    place = ["--load", _short(checkpoints), "--save", _short(checkpoints)]
    layout = ["--tp", "1", "--pp", "1", "--dp", "2", "--device", "cpu", "--log-interval", "10"]
    isotron("train", *place, *layout, *args.second)
    second = last_evaluation(checkpoints)

    say("4. Let it write.")
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    isotron(
        *("generate", "--load", _short(checkpoints), *prompts),
        *("--max-new-tokens", "40", "--temperature", "0.8", "--seed", "1", "--device", "cpu"),
    )
    return verdict(entropy, first, second, time.monotonic() - began, checkpoints)


def _arguments() -> argparse.Namespace:
    """Nothing needs to be given; a test makes the runs shorter."""
    parser = argparse.ArgumentParser(description="From text to a trained model in a few minutes.")
    parser.add_argument("--directory", type=Path, default=ROOT / "demo_run", help="made anew by each demo")
    parser.add_argument("--first", type=shlex.split, default=[], help="more options for the first training run")
    parser.add_argument("--second", type=shlex.split, default=["--train-iters", "200"], help="and for the second")
    return parser.parse_args()


def _clear(run: Path) -> None:
    """Remove what an earlier demo, finished or not, has left; a directory with anything else in it is not touched."""
    if not run.exists():
        return
    others = sorted(p.name for p in run.iterdir() if p.name not in ("data", "checkpoints"))
    if others:
        say(f"{run} holds {', '.join(others)}, which no demo has made: name another --directory.")
        raise SystemExit(2)
    say(f"What an earlier demo left in {_short(run)} is removed.")
    shutil.rmtree(run)


def isotron(*words: str) -> None:
    """Print an isotron command and run it in the repository's root; a failure ends the demo with the command's code."""
    print(f"\n$ isotron {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "isotron", *words], cwd=ROOT, env=_environment(), check=False)
    if done.returncode:
        say(f"The command above failed with exit code {done.returncode}; the demo ends here.")
        raise SystemExit(done.returncode)


def _environment() -> dict[str, str]:
    """That of this process, with this repository's isotron first; waiting threads must not spin on shared cores."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}


def unigram_entropy(train: Path, valid: Path) -> float:
    """Nats per token of the validation tokens under the frequencies of the training tokens, each counted once more."""
    from isotron.data.indexed import IndexedDataset

    tokens = [np.concatenate([data[i] for i in range(len(data))]) for data in map(IndexedDataset, (train, valid))]
    vocabulary = json.loads(Path(f"{train}.info.json").read_text(encoding="utf-8"))["tokenizer"]["vocab_size"]
    counts = np.bincount(tokens[0], minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[tokens[1]].mean())


def last_evaluation(run: Path) -> dict[str, float]:
    """The last line of metrics.jsonl that holds an evaluation; a loss that is not finite is null there."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [line for line in map(json.loads, lines) if "eval" in line][-1]
    return {"step": found["step"], "eval_loss": math.nan if found["eval_loss"] is None else found["eval_loss"]}


def verdict(
    entropy: float, first: dict[str, float], second: dict[str, float], seconds: float, checkpoints: Path
) -> int:
    """Print what came out; returns the exit code."""
    below = entropy - second["eval_loss"]
    say("Summary: loss on text that was not trained on, in nats per token")
    print(f"   unigram entropy (only how common each token is)   {entropy:.3f}")
    print(f"   after step {first['step']:<4} on 4 processes, TP 2 x PP 2        {first['eval_loss']:.3f}")
    print(f"   after step {second['step']:<4} resumed on 2 processes, DP 2       {second['eval_loss']:.3f}")
    print(f"   {seconds:.0f} s in all; curves: tensorboard --logdir {_short(checkpoints)}")
    if not below >= MARGIN:  # NaN too
        print(f"   FAILED: the loss must be at least {MARGIN} nats below the unigram entropy; it is {below:.3f} below.")
        return 1
    print(f"   PASSED: {below:.3f} nats below the unigram entropy.")
    return 0


def say(line: str) -> None:
    """One line of the story, set off from what the commands print."""
    print(f"\n{line}", flush=True)


def _short(path: Path) -> str:
    """Relative to the repository's root, where the commands run, if it lies there."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
