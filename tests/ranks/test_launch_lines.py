"""The launch lines of Megatron users end to end: preprocess, pretrain, pretrain again (resume), generate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREPROCESS = (
    "python tools/preprocess_data.py --input my_corpus.json --output-prefix my_gpt --vocab-file vocab.json "
    "--merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod"
)
PRETRAIN = (
    "bash examples/pretrain_gpt.sh --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 2 --global-batch-size 128 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--data-path my_gpt --vocab-file vocab.json --merge-file merges.txt --save-interval 1000 "
    "--save-checkpoint ./checkpoints --load-checkpoint ./checkpoints"
)
GENERATE = (
    "bash examples/inference/run_text_generation.sh --load-checkpoint ./checkpoints --tensor-model-parallel-size 2 "
    "--pipeline-parallel-size 2"
)
SMALLER = " --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --global-batch-size 4 --device cpu"


def launch(directory, line, stdin=""):
    """Run a line as a user would in `directory`; its output."""
    program, script, *words = line.split()
    command = [sys.executable if program == "python" else program, str(ROOT / script), *words]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=directory, env=env, input=stdin, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture
def workspace(tmp_path):
    """A corpus and a byte-level BPE of 258 entries."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [*map(chr, printable), *(chr(256 + n) for n in range(256 - len(printable))), "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    texts = (f"{i} green bottles hanging on the wall" for i in range(60))
    (tmp_path / "my_corpus.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def test_preprocess_pretrain_resume_generate(workspace):
    launch(workspace, PREPROCESS)
    begun = launch(workspace, PRETRAIN + SMALLER + " --train-iters 2")
    assert "a new run starts" in begun.stderr and "4 rank(s)" in begun.stdout
    launch(workspace, PRETRAIN + SMALLER + " --train-iters 4")
    lines = [json.loads(line) for line in (workspace / "checkpoints/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    answer = launch(workspace, GENERATE + " --max-new-tokens 3 --json --device cpu", stdin="green\n")
    (result,) = json.loads(answer.stdout)["results"]
    assert result["prompt"] == "green" and 1 <= len(result["tokens"]) <= 3
