"""examples/demo.py: its verdict, the entropy it compares with, what it removes, and the whole of it with short runs."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotron import cli
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.info import write_info

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def write(prefix: Path, documents: list[list[int]]) -> Path:
    with IndexedWriter(prefix, vocab_size=4) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens))
    write_info(prefix, {"tokenizer": {"vocab_size": 4}})
    return prefix


def test_the_entropy_is_that_of_smoothed_training_counts(demo: dict[str, Any], tmp_path: Path) -> None:
    train = write(tmp_path / "train", [[0, 0, 0], [1, 1, 2]])
    valid = write(tmp_path / "valid", [[0, 3]])
    expected = -(math.log(4 / 10) + math.log(1 / 10)) / 2  # counts 3 2 1 0, one more each
    assert demo["unigram_entropy"](train, valid) == pytest.approx(expected)


@pytest.mark.parametrize(("loss", "code"), [(4.65, 0), (6.22, 0), (6.24, 1), (7.9, 1), (math.nan, 1)])
def test_the_verdict(demo: dict[str, Any], capsys: pytest.CaptureFixture[str], loss: float, code: int) -> None:
    first, second = {"step": 160, "eval_loss": 7.0}, {"step": 200, "eval_loss": loss}
    assert demo["verdict"](6.931, first, second, 100.0, Path("demo_run")) == code
    assert ("PASSED" in capsys.readouterr().out) is (code == 0)


def test_only_what_a_demo_has_made_is_removed(demo: dict[str, Any], tmp_path: Path) -> None:
    demo["_clear"](tmp_path / "nothing")
    old = tmp_path / "old"
    (old / "data").mkdir(parents=True)
    demo["_clear"](old)
    assert not old.exists()
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        demo["_clear"](tmp_path)
    assert stopped.value.code == 2 and (tmp_path / "letters.txt").exists()


def test_the_whole_demo_with_short_runs(
    demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its first command runs as a process, as all do in a demo; the others here, which saves their start."""
    commands: list[list[str]] = []

    def run(command: list[str], **how: Any) -> Any:
        commands.append(command)
        if len(commands) == 1:
            return start(command, **how)
        assert command[:3] == commands[0][:3] and how["cwd"] == EXAMPLE.parents[1]
        return subprocess.CompletedProcess(command, cli.main(command[3:]))

    start = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(EXAMPLE.parents[1])
    short = ["--directory", str(tmp_path / "run")]
    short += [
        "--first",
        "--train-iters 2 --eval-iters 1 --global-batch-size 16",
        "--second",
        "--train-iters 3 --eval-iters 1",
    ]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *short])
    assert demo["main"]() == 1  # two steps teach nothing
    said = capfd.readouterr().out
    assert len(commands) == said.count("\n$ isotron ") == 5
    assert "resumed on 2 processes, DP 2" in said and "FAILED: the loss must be at least 0.7" in said
