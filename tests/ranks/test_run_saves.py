"""Runs that save in the background, and runs whose disk fills up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from isotron.core.checkpoint import save as saving
from isotron.core.errors import Refused
from isotron.train import main
from tests.ranks import runs


def events(run_dir: str | Path, name: str) -> list[dict[str, Any]]:
    """The events of one name in `metrics.jsonl`."""
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line.get("event") == name]


@pytest.mark.parametrize("layout", [{"dp": 2, "dtype": "bfloat16"}, {"tp": 2, "zero": 0}])
def test_saves_in_the_background_hold_the_same_bytes(ranks: Any, tmp_path: Path, layout: Any) -> None:
    jobs = []
    for name, background in (("waits", False), ("goes on", True)):
        home = str(tmp_path / name)
        cfg = runs.config("gpt", train_iters=7, save=home, save_interval=1, async_save=background, **layout)
        jobs.append((cfg, home))
    assert ranks(2, runs.train_each, jobs) == [[0, 0]] * 2
    for step in range(1, 8):
        a, b = (runs.step_dir(home, step) for _, home in jobs)
        runs.assert_same(runs.tensors(a), runs.tensors(b))
        metas = [runs.Source(d).manifest.meta for d in (a, b)]
        assert {k: v for k, v in metas[0].items() if k != "config"} == {
            k: v for k, v in metas[1].items() if k != "config"
        }
    assert [e["step"] for e in events(jobs[1][1], "saved")] == list(range(1, 8))


def with_full_disk(cfg: Any, run_dir: str, failing: list[int]) -> int:
    """A run in which the last rank finds no room at some of the saves, counted from 1."""
    write, count = saving.write_staged, iter(range(1, 10**6))

    def write_staged(directory: Path, staged: Any) -> Any:
        if next(count) in failing and cfg.layout.world - 1 == runs.here().rank:
            raise OSError(28, "No space left on device")
        return write(directory, staged)

    saving.write_staged = write_staged
    try:
        return runs.train(cfg, run_dir)
    finally:
        saving.write_staged = write


def with_one_full_node(cfg: Any, run_dir: str) -> int:
    """A run in which the last rank's disk has no room for a checkpoint, and the first one's has."""
    full = runs.here().rank == cfg.layout.world - 1
    with patch.object(main, "free_bytes", lambda path: 0 if full else 2**50):
        return runs.train(cfg, run_dir)


def with_one_node_that_lacks(cfg: Any, run_dir: str, what: str) -> int:
    """A run in which the last rank does not find what the others do."""
    real = getattr(main, what)

    def reads(*args: Any) -> Any:
        if runs.here().rank == cfg.layout.world - 1:
            raise FileNotFoundError(2, "No such file or directory", "elsewhere.json")
        return real(*args)

    with patch.object(main, what, reads):
        return runs.train(cfg, run_dir)


@pytest.mark.parametrize(("what", "asked"), [("_tokenizer", "the tokenizer"), ("datasets", "the data")])
def test_a_file_that_one_node_lacks_is_a_refusal_on_every_rank(
    ranks: Any, tmp_path: Path, what: str, asked: str
) -> None:
    with pytest.raises(Refused, match=r"elsewhere\.json.* \(rank 1 of 2\)") as caught:
        ranks(2, with_one_node_that_lacks, runs.config("gpt", dp=2), str(tmp_path), what)
    assert [p.asked for p in caught.value.problems] == [asked]


def test_one_full_node_is_a_refusal_on_every_rank_at_start(ranks: Any, tmp_path: Path) -> None:
    """Had a rank gone on, its pool would say that others failed, and not that all refused the same."""
    with pytest.raises(Refused, match=r"0\.000 GB are free \(rank 1 of 2\)") as caught:
        ranks(2, with_one_full_node, runs.config("gpt", dp=2, save=str(tmp_path)), str(tmp_path))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_keeps_the_step_before_and_the_run_goes_on_if_told_to(
    ranks: Any, tmp_path: Path, background: bool
) -> None:
    """The save at 4 fails; in the background run so does the last one, at first."""
    home = str(tmp_path)
    failing = [2, 4] if background else [2]
    leaves = {"train_iters": 8, "save_interval": 2, "keep_last": 2, "async_save": background}
    cfg = runs.config("llama", dp=2, save=home, on_save_failure="continue", **leaves)
    assert ranks(2, with_full_disk, cfg, home, failing) == [0, 0]
    assert [e["step"] for e in events(home, "saved")] == [2, 6, 8]
    lost = events(home, "save_failed")
    assert len(lost) == len(failing) and "No space left on device (rank 1 of 2)" in lost[0]["why"]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000006", "step_00000008"]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_ends_the_run_on_all_ranks_unless_told_otherwise(
    ranks: Any, tmp_path: Path, background: bool
) -> None:
    cfg = runs.config("llama", dp=2, save=str(tmp_path), train_iters=12, save_interval=2, async_save=background)
    with pytest.raises(Refused) as caught:
        ranks(2, with_full_disk, cfg, str(tmp_path), [2])
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 1 and problem.asked.startswith("save step 4")
    assert "No space left on device (rank 1 of 2)" in problem.case
    assert (tmp_path / "latest").read_text().strip() == "step_00000002"
    assert max(runs.lines(tmp_path)) <= 6  # heard of at the next save at the latest


def test_the_last_save_must_succeed(ranks: Any, tmp_path: Path) -> None:
    cfg = runs.config("llama", dp=2, save=str(tmp_path), train_iters=4, save_interval=2, on_save_failure="continue")
    with pytest.raises(Refused, match="No space left"):
        ranks(2, with_full_disk, cfg, str(tmp_path), [2, 3])
    assert (tmp_path / "latest").read_text().strip() == "step_00000002"
