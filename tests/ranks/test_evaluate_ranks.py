"""Evaluation in every layout gives the numbers of one process; rows are dealt unevenly and batches are of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isotron import cli
from tests.evaluation import both_paths, results, scored, write
from tests.generation import save_run

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TP2": (2, "gpt", {"tp": 2}),
    "TP2-SP": (2, "llama", {"tp": 2, "sequence_parallel": True}),
    "TP4": (4, "llama-tied", {"tp": 4}),
    "PP2": (2, "gpt", {"pp": 2}),
    "PP2-VPP2": (2, "llama-tied", {"pp": 2, "vpp": 2}),
    "PP2-ZBV": (2, "llama-tied", {"pp": 2, "schedule": "zbv"}),
    "DP2": (2, "gpt", {"dp": 2}),
    "DP4-ZERO3": (4, "llama", {"dp": 4, "zero": 3}),
    "CP2": (2, "llama", {"cp": 2}),
    "TP2-DP2": (4, "llama", {"tp": 2, "dp": 2}),
    "EP2-DP2": (2, "mixtral", {"dp": 2, "ep": 2}),
    "PP2-DP2": (4, "llama", {"pp": 2, "dp": 2, "recompute": "full"}),
}


def same_numbers(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, numbers in right.items():
        for kind, value in numbers.items():
            assert found[name][kind] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12))


@pytest.mark.parametrize("world, name, layout", LAYOUTS.values(), ids=LAYOUTS)
def test_scores_of_one_process(ranks, world, name, layout):
    expected = scored(name, {}, 3)
    for found in ranks(world, scored, name, layout, 2):
        for mine, right in zip(found, expected, strict=True):
            assert mine[0] == pytest.approx(right[0], abs=1e-9) and mine[1] == right[1]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_every_task_of_one_process(ranks, layout, tmp_path):
    write(tmp_path)
    expected = results("gpt", {}, str(tmp_path))
    assert len(expected) == 6
    for found in ranks(2, results, "gpt", layout, str(tmp_path)):
        for mine, right in zip(found, expected, strict=True):
            assert mine["task"] == right["task"] and mine["examples"] == right["examples"]
            same_numbers(mine["metrics"], right["metrics"])


def test_the_command_on_four_processes(tmp_path, capfd):
    step = save_run("gpt", tmp_path)
    lines = [json.dumps({"text": " ".join(map(str, range(1, n)))}) for n in (9, 4, 30, 6, 7)]
    (tmp_path / "ids.jsonl").write_text("\n".join(lines))
    words = ["evaluate", "--load", str(step), "--task", f"perplexity={tmp_path / 'ids.jsonl'}", "--json"]
    assert cli.main(words) == 0
    (right,) = json.loads(capfd.readouterr().out)["results"]
    assert cli.main([*words, "--pp", "2", "--dp", "2", "--micro-batch-size", "1"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["results"]
    same_numbers(found["metrics"], right["metrics"])
    assert found["tokens"] == right["tokens"] == 8 + 3 + 29 + 5 + 6


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_both_paths_of_score_are_those_of_one_process(ranks, layout):
    rows = [[130, *range(5, 25)], [7, 8], [60, 3, 3, 99]]
    expected = both_paths("gpt", {}, rows)
    for found in ranks(2, both_paths, "gpt", layout, rows):
        for mine, right in zip(found, expected, strict=True):
            assert mine == pytest.approx(right, abs=1e-9)
