"""Tasks during training: the scorers of `isotron evaluate` on the model as it is, in the layout of its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotron import cli
from isotron.evaluate.during import during
from isotron.evaluate.tasks import problems_of
from isotron.train.main import run
from tests.ranks.runs import config, here, write_data

LAYOUT = {"pp": 2, "vpp": 1, "tp": 2, "sequence_parallel": True, "recompute": "full"}


def trained(leaves: dict[str, Any], directory: str) -> int:
    cfg = config("llama", **leaves)
    return run(cfg, directory, here(), during)


def lines(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "task" in line]


def test_a_run_measures_tasks(ranks, tmp_path, capsys):
    texts = [{"text": " ".join(str((i * j) % 130) for j in range(1, n))} for i, n in enumerate((9, 5, 14), 1)]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, texts)))
    place = str(tmp_path / "ids.jsonl")
    tasks = (f"perplexity={place}", f"lambada={place}")
    leaves = {"eval_tasks": tasks, "train_iters": 4, "eval_interval": 2, "data_path": (write_data(tmp_path),),
              "split": "100,0,0", "dtype": "float64"}  # fmt: skip
    one, four = tmp_path / "one", tmp_path / "four"
    assert ranks(1, trained, {**leaves, "save": str(one)}, str(one)) == [0]
    assert ranks(4, trained, {**leaves, **LAYOUT, "save": str(four)}, str(four)) == [0] * 4
    alone, together = lines(one), lines(four)
    assert [(line["step"], line["task"]) for line in alone] == [
        (s, t) for s in (2, 4) for t in ("perplexity", "lambada")
    ]
    for a, b in zip(alone, together, strict=True):
        assert a["examples"] == b["examples"] == 3
        assert b["metrics"]["perplexity"]["value"] == pytest.approx(a["metrics"]["perplexity"]["value"], rel=1e-9)
    words = ["evaluate", "--load", str(four), "--task", tasks[0], "--overlapping-eval", "0", "--json"]
    capsys.readouterr()
    assert cli.main(words) == 0
    (after,) = json.loads(capsys.readouterr().out)["results"]
    assert after["metrics"]["loss"]["value"] == pytest.approx(together[2]["metrics"]["loss"]["value"], rel=1e-9)


def test_tasks_of_a_run_are_checked_before_it_starts(tmp_path):
    said = problems_of(["perplexity=nowhere", "harness=piqa"])
    assert ["no such file" in said[0].case, "not during training" in said[1].case] == [True, True]
    assert "the tasks are" in problems_of(["nonsense=x"])[0].case
    assert problems_of([f"perplexity={write_data(tmp_path)}"]) == []
