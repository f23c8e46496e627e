"""Frequent checkpoints in directories that each node has for itself, and what is left when one of them is lost."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from isotron.cli import main
from isotron.core.checkpoint.near import Near
from isotron.core.checkpoint.near_source import find_near
from isotron.core.checkpoint.save import Saved
from isotron.core.errors import Refused
from isotron.core.layout import Box
from isotron.core.mesh import Mesh
from tests.ranks import runs


def on_own_node(cfg: Any, run_dir: str) -> tuple[int, str]:
    """A run whose every rank has a directory that no other rank sees."""
    mine = f"{cfg.checkpoint.local_save}/{runs.here().rank}"
    return runs.train_heard(runs.changed(cfg, local_save=mine), run_dir)


def cut_off(home: Path, *later: int) -> None:
    """As if the run had ended before these steps were saved in its directory."""
    for step in later:
        shutil.rmtree(runs.step_dir(home, step))
    (home / "latest").write_text("step_00000009\n")


def test_a_run_goes_on_from_the_neighbours_copy_bitwise(ranks: Any, tmp_path: Path) -> None:
    """Saved at 9, 18, 20, and near by at 4, 8, 12, 16; the second node's directory is lost with all after 16."""
    home, near = tmp_path / "run", tmp_path / "near"
    leaves = {"save_interval": 9, "local_save": str(near), "local_save_interval": 4, "local_save_ranks": 1}
    cfg = runs.config("gpt", dp=2, dtype="bfloat16", save=str(home), load=str(home), async_save=True, **leaves)
    assert [code for code, _ in ranks(2, on_own_node, cfg, str(home))] == [0, 0]
    names = ("0/node_00000", "1/node_00001")
    assert [sorted(p.name for p in (near / n).iterdir()) for n in names] == [["step_00000016"]] * 2
    files = ["manifest.json", "next.json", "rank_00000.safetensors", "rank_00001.safetensors"]
    assert [sorted(p.name for p in (near / n / "step_00000016").iterdir()) for n in names] == [files] * 2
    expected = runs.tensors(runs.step_dir(home, 20))
    cut_off(home, 18, 20)
    shutil.rmtree(near / "1")
    kept = near / "0/node_00000/step_00000016/next.json"
    facts = json.loads(kept.read_text())
    assert facts["step"] == 17 and facts["loss"] == runs.lines(str(home))[17]
    kept.write_text(json.dumps({**facts, "loss": facts["loss"] + 1}))
    with pytest.raises(Refused, match="step 17 gives the loss"):
        ranks(2, on_own_node, cfg, str(home))
    kept.write_text(json.dumps(facts))
    (_, heard), (_, _) = ranks(2, on_own_node, cfg, str(home))
    assert "at step 16, 64 samples consumed" in heard and " 0 bytes of it" not in heard
    runs.assert_same(expected, runs.tensors(runs.step_dir(home, 20)))
    events = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e.get("event") == "saved_locally"] == [4, 8, 12, 16]


def test_other_layouts_other_runs_and_other_places(ranks: Any, tmp_path: Path) -> None:
    """One process takes what two kept; a run elsewhere, an explicit step and an older step do not."""
    home, near = tmp_path / "run", tmp_path / "near"
    leaves = {"save_interval": 9, "local_save": str(near), "local_save_interval": 8, "local_save_ranks": 1}
    cfg = runs.config("llama", dtype="float64", save=str(home), load=str(home), train_iters=18, **leaves)
    assert ranks(2, runs.train, runs.changed(cfg, dp=2), str(home)) == [0, 0]
    cut_off(home, 18)
    kept = near / "node_00001" / "step_00000016"
    shutil.copytree(kept, tmp_path / "saved")
    shutil.rmtree(near / "node_00000")
    ((_, heard),) = ranks(1, runs.train_heard, runs.changed(cfg, load=runs.step_dir(home, 9), train_iters=9), str(home))
    assert "at step 9" in heard and not kept.exists()  # it lies beyond the step that this run goes on from
    shutil.copytree(tmp_path / "saved", kept)
    ((code, heard),) = ranks(1, runs.train_heard, runs.changed(cfg, train_iters=16), str(home))
    assert code == 0 and "at step 16" in heard and "have no copy on another node: one node" in heard
    a, b = runs.tensors(tmp_path / "saved"), runs.tensors(runs.step_dir(home, 16))
    runs.assert_same(a, b, b)
    shutil.copytree(tmp_path / "saved", kept, dirs_exist_ok=True)
    ((_, heard),) = ranks(1, runs.train_heard, runs.changed(cfg, train_iters=16), str(home))
    assert f"resumed from {home}" in heard  # the same step in both
    whole = damage(home)
    ((_, heard),) = ranks(1, runs.train_heard, runs.changed(cfg, train_iters=16), str(home))
    assert f"resumed from {near}" in heard  # every checkpoint of the run is damaged, that of a node is not
    damage(home)
    shutil.rmtree(kept)
    with pytest.raises(Refused, match=r"manifest\.json is damaged, what it holds is no JSON"):
        ranks(1, runs.train, runs.changed(cfg, train_iters=16), str(home))
    for manifest, text in whole.items():
        manifest.write_text(text)
    (home / "local_run").write_text("another")
    cut_off(home, 16)
    ((_, heard),) = ranks(1, runs.train_heard, runs.changed(cfg, train_iters=9), str(home))
    assert "at step 9" in heard


def damage(home: Path) -> dict[Path, str]:
    """Spoil the manifest of every step; what they were."""
    whole = {manifest: manifest.read_text() for manifest in home.glob("step_*/manifest.json")}
    for manifest in whole:
        manifest.write_text("{")
    return whole


def near_of(base: str) -> Near:
    mesh = Mesh(runs.here().rank, dp=runs.here().size)
    return Near(Path(base) / str(mesh.rank), "run", 1, mesh.apart())


def keep(base: str, step: int) -> None:
    """Two rows of three from each rank, and a tensor of the first rank alone."""
    near, rank = near_of(base), runs.here().rank
    mine = torch.arange(6.0).view(2, 3) + 10 * rank + 100 * step
    saved = [Saved("w", mine.dtype, (2 * near.group.size, 3), [(Box((2 * rank, 0), (2, 3)), mine)])]
    near.save(step, saved, {"x": step})


def find_and_read(base: str, newer_than: int = -1) -> tuple[int, list[float], list[str]] | list[str]:
    """The step that is found, its middle column as every rank reads it, and what was said."""
    near, said = near_of(base), list[str]()
    source = find_near(near, newer_than, said.append)
    if source is None:
        return said
    for _ in range(2):
        out = torch.zeros(2 * near.group.size, 1)
        source.read("w", Box((0, 1), tuple(out.shape)), out)
        if source.noting:
            source.fetch()
    return source.manifest.step, out.flatten().tolist(), said


def test_damaged_copies_do_not_count(ranks: Any, tmp_path: Path) -> None:
    base = str(tmp_path)
    ranks(2, keep, base, 1)
    column = [101.0, 104.0, 111.0, 114.0]
    assert ranks(2, find_and_read, base) == [(1, column, [])] * 2
    assert ranks(2, find_and_read, base, 1) == [[]] * 2
    flip(tmp_path / "1/node_00001/step_00000001/rank_00000.safetensors")  # the copy; the file itself is whole
    found = ranks(2, find_and_read, base)
    assert [f[:2] for f in found] == [(1, column)] * 2
    assert found[0][2] == ["the copy of rank_00000.safetensors in node_00001 is damaged"]
    (tmp_path / "0/node_00000/step_00000001/rank_00000.safetensors").write_bytes(b"torn")
    assert ranks(2, find_and_read, base)[0][-1].endswith("every copy of rank_00000.safetensors is damaged")
    ranks(2, keep, base, 2)
    assert ranks(2, find_and_read, base)[1][0] == 2
    (tmp_path / "1/node_00001/step_00000002/manifest.json").write_text("{")
    assert ranks(2, find_and_read, base)[1][0] == 2
    flip(tmp_path / "0/node_00000/step_00000002/rank_00000.safetensors")  # whole where the manifest is not
    assert [f[:2] for f in ranks(2, find_and_read, base)] == [(2, [x + 100 for x in column])] * 2


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_directory_that_takes_nothing_is_refused_at_the_start_and_later_costs_that_save_alone(
    ranks: Any, tmp_path: Path
) -> None:
    """Refused when it is another node's too, and when it is an address; then a save that finds a file in its way."""
    home, near = tmp_path / "run", tmp_path / "near"
    leaves = {"local_save": str(near), "local_save_interval": 2, "local_save_ranks": 1}
    cfg = runs.config("llama", dp=2, save=str(home), train_iters=4, save_interval=4, **leaves)
    near.mkdir()
    (near / "node_00001").write_text("no directory")
    with pytest.raises(Refused, match=rf"--local-save {near}\nbut:    nothing can be written .*\(rank 1 of 2\)"):
        ranks(2, runs.train, cfg, str(home))
    (near / "node_00001").unlink()
    with pytest.raises(Refused, match="--remote-save file:///proc/no\nbut:    nothing can be written there"):
        ranks(2, runs.train, runs.changed(cfg, remote_save="file:///proc/no"), str(home))
    assert not (home / "metrics.jsonl").exists()
    (near / "node_00001" / "step_00000002.tmp").write_text("in the way")
    assert ranks(2, runs.train, cfg, str(home)) == [0, 0]
    events = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert [e for e in events if e.get("event") == "local_save_failed"] and Path(runs.step_dir(home, 4)).is_dir()


def test_the_command_goes_on_from_a_node_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words after a kill before the first checkpoint of the run; and when every one of them is damaged."""
    home, near = tmp_path / "run", tmp_path / "near"
    words = shlex.split(
        "train --num-layers 1 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 8 --seq-length 8 "
        "--vocab-size 20 --eval-iters 0 --device cpu --mock-data --no-tensorboard --lr-decay-iters 9 "
        f"--local-save-interval 3 --load {home} --save {home} --save-interval 100 --local-save {near}"
    )
    assert main([*words, "--train-iters", "4"]) == 0
    shutil.rmtree(runs.step_dir(home, 4))
    capsys.readouterr()
    assert main([*words, "--train-iters", "5"]) == 0
    said = capsys.readouterr()
    assert f"no whole checkpoint in {home}: the run goes on" in said.err and "at step 3" in said.out
    (Path(runs.step_dir(home, 5)) / "manifest.json").write_text("{")
    assert main([*words, "--train-iters", "6"]) == 0
    assert "at step 3" in capsys.readouterr().out
