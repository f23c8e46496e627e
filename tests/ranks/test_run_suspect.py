"""Runs in which steps are suspect, injected on one rank: skipped, run again, rewound; counters and data are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotron.core.errors import Refused
from tests.ranks import runs
from tests.ranks.test_run_saves import events


def test_a_glitch_changes_nothing_and_a_fault_that_stays_is_skipped(ranks: Any, tmp_path: Path) -> None:
    """Run again in place: the glitch at step 3 leaves no trace in the weights; the NaN of step 5 is there each time."""
    usual = runs.config("llama", dp=2, train_iters=4, save=str(tmp_path / "a"))
    hurt = runs.changed(usual, save=str(tmp_path / "b"), rerun=True, inject=("glitch@3:1",))
    more = runs.changed(usual, save=str(tmp_path / "c"), rerun=True, inject=("nan@3:1",), straggler_interval=2)
    jobs = [(usual, str(tmp_path / "a")), (hurt, str(tmp_path / "b")), (more, str(tmp_path / "c"))]
    assert ranks(2, runs.train_each, jobs) == [[0] * 3] * 2
    runs.assert_same(runs.tensors(runs.step_dir(tmp_path / "a", 4)), runs.tensors(runs.step_dir(tmp_path / "b", 4)))
    (glitch,) = events(tmp_path / "b", "suspect_step")
    assert (glitch["step"], glitch["fault"], glitch["applied"]) == (3, "transient", True)
    (stays,) = events(tmp_path / "c", "suspect_step")
    assert (stays["step"], stays["fault"], stays["applied"]) == (3, "persistent", False)
    meta = runs.Source(runs.step_dir(tmp_path / "c", 4)).manifest.meta
    assert (meta["skipped"], meta["nan"], meta["updates"]) == (1, 1, 3) and len(meta["recent"]) == 3
    assert [len(e["busy_s"]) for e in events(tmp_path / "c", "stragglers")] == [2, 2]


def test_a_rewind_goes_on_behind_the_data_that_led_there(ranks: Any, tmp_path: Path) -> None:
    """NaN at step 6: back to step 4, samples 16 to 23 are left out; equal to a run that never had them."""
    home = str(tmp_path)
    cfg = runs.config("llama", dp=2, train_iters=8, save=home, save_interval=2, async_save=True)
    hurt = runs.changed(cfg, on_nan="rewind", inject=("nan@6:0",))
    assert ranks(2, runs.train, hurt, home) == [0, 0]
    (back,) = events(home, "rewound")
    assert back["step"] == 4 and back["left_out"] == [16, 23] and "step 6: the loss is nan" in back["why"]
    ids = runs.lines(home, "sample_ids")
    assert ids == {1: [0, 3], 2: [4, 7], 3: [8, 11], 4: [12, 15], 5: [24, 27], 6: [28, 31], 7: [32, 35], 8: [36, 39]}
    meta = runs.Source(runs.step_dir(home, 8)).manifest.meta
    assert (meta["rewinds"], meta["skipped"], meta["updates"], meta["consumed_samples"]) == (1, 0, 8, 40)


def test_a_rewind_without_a_checkpoint_is_refused(ranks: Any, tmp_path: Path) -> None:
    cfg = runs.config("llama", dp=2, train_iters=4, save=str(tmp_path), on_nan="rewind", inject=("nan@2:1",))
    with pytest.raises(Refused, match="nothing has been saved yet"):
        ranks(2, runs.train, cfg, str(tmp_path))


def test_a_flipped_bit_of_a_replicated_weight_ends_the_run(ranks: Any, tmp_path: Path) -> None:
    cfg = runs.config("llama", dp=2, zero=0, train_iters=4, save=str(tmp_path), check_interval=1)
    with pytest.raises(Refused, match="these differ between ranks"):
        ranks(2, runs.train, runs.changed(cfg, inject=("bitflip@2:1",)), str(tmp_path))


def test_the_time_of_a_job_ends_and_the_next_goes_on(ranks: Any, tmp_path: Path) -> None:
    home = str(tmp_path)
    cfg = runs.config("llama", dp=2, train_iters=4, save=home, load=home)
    assert ranks(2, runs.train, runs.changed(cfg, exit_duration_in_mins=1e-6), home) == [143, 143]
    assert [e["signal"] for e in events(home, "stopped")] == ["exit-duration-in-mins"]
    assert (tmp_path / "latest").read_text().strip() == "step_00000001"
    assert ranks(2, runs.train, cfg, home) == [0, 0]
    assert sorted(runs.lines(home)) == [1, 2, 3, 4]


def test_the_first_loss_after_a_resume_is_compared(ranks: Any, tmp_path: Path) -> None:
    """It is kept beside each checkpoint but the last, holds in another layout, and refuses weights that are others."""
    home = str(tmp_path)
    cfg = runs.config("llama", dp=2, train_iters=4, save=home, save_interval=1, async_save=True, dtype="float64")
    assert ranks(2, runs.train, cfg, home) == [0, 0]
    kept = {s: json.loads((tmp_path / f"step_0000000{s}" / "next.json").read_text()) for s in (1, 2, 3)}
    assert {s: f["loss"] for s, f in kept.items()} == {s: runs.lines(home)[s + 1] for s in kept}
    assert not (tmp_path / "step_00000004" / "next.json").exists()
    other = runs.changed(cfg, dp=1, tp=2, load=runs.step_dir(home, 2), save=f"{home}/b", train_iters=3)
    (tmp_path / "step_00000001" / "next.json").write_text(json.dumps({**kept[1], "loss": kept[1]["loss"] + 0.1}))
    wrong = runs.changed(other, load=runs.step_dir(home, 1), save=f"{home}/c")
    assert ranks(2, runs.train, other, f"{home}/b") == [0, 0]
    with pytest.raises(Refused, match="step 2 gives the loss"):
        ranks(2, runs.train, wrong, f"{home}/c")
    assert ranks(2, runs.train, runs.changed(wrong, resume_check=False), f"{home}/c") == [0, 0]


def test_weights_of_another_model_come_under_new_names(ranks: Any, tmp_path: Path) -> None:
    """Fewer layers, one of them renamed: what is missing is named and stays as it was drawn; strict refuses it all."""
    home, there = str(tmp_path / "a"), str(tmp_path / "b")
    cfg = runs.config("llama", dp=2, train_iters=1, save=home)
    assert ranks(2, runs.train, cfg, home) == [0, 0]
    part = runs.changed(cfg, load=home, save=there, finetune=True, rename=("layers.0.*=layers.2.*", "layers.2.*=old.*"))
    with pytest.raises(Refused) as caught:
        ranks(2, runs.train, part, there)
    said = str(caught.value)
    assert (
        "layers.0.norm_attention" in said or "layers.0." in said and "old." in said and len(caught.value.problems) == 2
    )
    (code, heard), _ = ranks(2, runs.train_heard, runs.changed(part, strict_load=False), there)
    assert code == 0 and "as they were initialised: layers.0." in heard and "not in the model: old." in heard
    with pytest.raises(Refused, match="resumed whole"):
        ranks(2, runs.train, runs.changed(part, finetune=False, train_iters=2), there)
