"""What a process of a run loads: every module is a part of a second before its first step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FIRST_STEP = """
import os, sys
from isotron import pool
from isotron.commands import train_rank
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, measure
pool._reset(dict(os.environ))
model = GPTConfig(1, 8, 2, vocab_size=20, max_position_embeddings=8, hidden_dropout=0.1)
measure(Case(model, Layout(dp=1), 8, steps=1))
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_a_first_step_loads_neither_the_compiler_nor_its_algebra() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stdout + done.stderr
