"""The recipe of docs/long_sequences.md, shortened: trained on 64 tokens, then on 512 with stretched angles."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.needle import NEEDLE, PROMPT, pairs

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = "assets/demo_tokenizer/tokenizer.json"
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 128"
QUIET = "--eval-iters 0 --no-tensorboard --log-interval 20 --device cpu"


def said(*words: str) -> str:
    found = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def isotron(line: str) -> str:
    return said("-m", "isotron", *line.split())


def test_a_needle_stands_in_one_of_two_rows() -> None:
    text = list(range(1000))
    for a, b in pairs(text, 200, 4):
        assert len(a.tokens) == len(b.tokens) == 200 and a.first == b.first == 200 - NEEDLE + PROMPT
        needle = list(a.tokens[-NEEDLE:])
        places = [i for i in range(200 - NEEDLE) if list(a.tokens[i : i + NEEDLE]) == needle]
        assert places and list(a.tokens[-NEEDLE:]) == list(b.tokens[-NEEDLE:])
        assert len(places) > sum(list(b.tokens[i : i + NEEDLE]) == needle for i in range(200 - NEEDLE))


@pytest.mark.slow
def test_the_recipe(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        isotron(f"preprocess --input assets/text/{part}.jsonl --output-prefix {tmp_path}/{part} --append-eod "
                f"--tokenizer-model {TOKENIZER}")  # fmt: skip
    isotron(f"train --family llama {SMALL} {QUIET} --tokenizer-model {TOKENIZER} --data-path {tmp_path}/train "
            f"--seq-length 64 --micro-batch-size 8 --global-batch-size 8 --train-iters 60 --lr 2e-3 "
            f"--save {tmp_path}/short")  # fmt: skip
    isotron(f"finetune --load {tmp_path}/short --save {tmp_path}/long --data-path {tmp_path}/train {QUIET} "
            f"--seq-length 512 --max-position-embeddings 512 --rope-scaling yarn --rope-factor 8 "
            f"--rope-original-positions 64 --cp 2 --micro-batch-size 1 --global-batch-size 1 --lr 2e-4 "
            f"--train-iters 20")  # fmt: skip
    for run in ("short", "long"):
        text = said("examples/needle.py", f"{tmp_path}/{run}", "--text", f"{tmp_path}/valid", "--lengths", "64", "512",
                    "--count", "4")  # fmt: skip
        found = re.findall(r"(\d+) tokens: the needle is worth ([+-][\d.]+) nats", text)
        assert [int(n) for n, _ in found] == [64, 512] and all(math.isfinite(float(x)) for _, x in found)
