"""What `--load` finds: a run to continue, nothing where a run may start, or a refusal."""

from __future__ import annotations

import pytest

from isotron.config.resume import Found, find_checkpoint
from isotron.config.schema import RunConfig, to_dict
from isotron.core.checkpoint.format import Manifest
from isotron.core.errors import Refused


def saved(run, step, meta):
    directory = run / f"step_{step:08d}"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_bytes(Manifest(step, meta, {}, {}).dumps())
    (run / "latest").write_text(directory.name)
    return directory


def test_no_load_is_a_new_run():
    assert find_checkpoint("", "anywhere") == Found()


def test_a_run_and_a_step_are_found(tmp_path):
    old = saved(tmp_path, 10, {"config": to_dict(RunConfig())})
    new = saved(tmp_path, 20, {"config": to_dict(RunConfig())})
    assert find_checkpoint(str(tmp_path), "") == Found(str(new), to_dict(RunConfig()), 20)
    assert find_checkpoint(str(old), "").step == 10


@pytest.mark.parametrize("exists", [False, True])
def test_load_equal_to_save_may_be_empty(tmp_path, exists):
    run = tmp_path / "checkpoints"
    if exists:
        run.mkdir()
        (run / "metrics.jsonl").write_text("")
    said = []
    assert find_checkpoint(str(run), f"{tmp_path}/./checkpoints", said.append) == Found()
    assert "a new run starts" in said[0]


@pytest.mark.parametrize(("exists", "words"), [(False, "no such directory"), (True, "holds no checkpoint")])
def test_anything_else_that_finds_nothing_is_refused(tmp_path, exists, words):
    run = tmp_path / "run"
    if exists:
        run.mkdir()
    with pytest.raises(Refused, match=words) as refused:
        find_checkpoint(str(run), str(tmp_path / "other"))
    assert f"--load {run}" in refused.value.problems[0].asked


def test_a_checkpoint_without_a_run_config_is_refused(tmp_path):
    saved(tmp_path, 1, {})
    with pytest.raises(Refused, match="holds no run config"):
        find_checkpoint(str(tmp_path), "")
