"""The recipe of docs/long_sequences.md, shortened: trained on 64 tokens, then on 512 with stretched angles."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.facts import KEYS, VALUES, draw_facts, mixed, question
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


def test_a_fact_is_told_once_and_asked_for_at_the_end() -> None:
    draw, text, v = random.Random(1), list(range(100)) * 9, 100
    told = draw_facts(draw, v, 6) * 3
    row = mixed(draw, text, 200, told)
    at = [i for i, t in enumerate(row) if t >= v and t < v + KEYS]
    assert len(row) == 200 and [(row[i], row[i + 1]) for i in at] == told and len(dict(told)) == 6
    assert all(v + KEYS <= value < v + KEYS + VALUES for _, value in told)
    between = [t for t in row if t < v]
    assert all((b - a) % 100 == 1 for a, b in zip(between, between[1:], strict=False))  # one run of the text
    for asked in range(5):
        tokens, first = (found := question(draw, text, v, 150, 5, asked)).tokens, found.first
        *earlier, key, value = tokens
        assert len(tokens) == 150 and first == len(tokens) - 1 and earlier.count(key) == 1
        assert earlier[earlier.index(key) + 1] == value and earlier[-1] < v


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


@pytest.mark.slow
def test_facts_are_written_and_asked_for(tmp_path: Path) -> None:
    isotron(f"preprocess --input assets/text/valid.jsonl --output-prefix {tmp_path}/text --append-eod "
            f"--tokenizer-model {TOKENIZER}")  # fmt: skip
    facts = ["--text", f"{tmp_path}/text", "--vocab-size", "4096", "--facts", "8"]
    said(
        "-m", "examples.facts", "write", *facts, "--length", "64", "--documents", "400", "--output", f"{tmp_path}/facts"
    )
    isotron(f"train --family llama {SMALL} {QUIET} --vocab-size {4096 + KEYS + VALUES} --tokenizer-type NullTokenizer "
            f"--data-path {tmp_path}/facts --seq-length 64 --micro-batch-size 8 --global-batch-size 8 --train-iters 40 "
            f"--lr 2e-3 --optimizer muon --save {tmp_path}/run")  # fmt: skip
    text = said("-m", "examples.facts", "ask", f"{tmp_path}/run", *facts, "--lengths", "64", "96", "--rows", "8")
    found = re.findall(r"(\d+) tokens: +([\d.]+) % of 8 values found, ([+-][\d.]+) nats each", text)
    # forty steps teach which tokens are values, not which one follows a key
    assert [int(n) for n, _, _ in found] == [64, 96] and all(-8 < float(x) < -2 for _, _, x in found)
