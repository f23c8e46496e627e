"""Checkpoints of every released format version still load and train on; what is no checkpoint is refused untouched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from isotron import cli
from isotron.config.schema import changed, from_dict
from isotron.core.checkpoint.format import read_manifest
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.locate import find
from isotron.core.checkpoint.migrate import VERSION
from isotron.core.checkpoint.partial import Renamed, parse_renames, renamed
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.launch import World
from isotron.train.main import run
from tests.local.test_checkpoint import load_all, save_one, values

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = range(1, VERSION + 1)
NEXT_LOSS = 2.251110076904297  # of step 3, as it was when the first of them was made


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_every_version_trains_on(version: int, tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(FIXTURES / f"checkpoint_v{version}", home)
    step = find(home, hashes=True)
    assert step is not None and json.loads((step / "manifest.json").read_text())["format_version"] == version
    config = changed(from_dict(read_manifest(step).meta["config"]), load=str(home), save=str(tmp_path / "on"))
    assert run(changed(config, train_iters=3, run_dir=str(tmp_path / "on")), str(tmp_path / "on"), World()) == 0
    lines = [json.loads(line) for line in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in lines if "loss" in r] == [(3, pytest.approx(NEXT_LOSS, rel=1e-6))]


def test_the_versions_hold_the_same_tensors() -> None:
    first, *others = (load_all(FIXTURES / f"checkpoint_v{v}" / "step_00000002") for v in VERSIONS)
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(first[n], other[n]) for n in first)


# ---- files that mean harm ------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    """In the place of a safetensors file, of the manifest, and as a directory of another program."""
    trace, bomb = tmp_path / "trace", pickle.dumps(Bomb(tmp_path / "trace"))
    step = save_one(tmp_path / "run", 1, {"w": values((4, 4))})
    (step / "rank_00000.safetensors").write_bytes(bomb + b" " * 10_000)
    with pytest.raises(Refused, match="truncated or damaged"):
        Source(step)
    size = read_manifest(step).files["rank_00000.safetensors"].bytes
    (step / "rank_00000.safetensors").write_bytes((bomb + b" " * size)[:size])
    with pytest.raises(Refused, match="cannot be read"):
        load_all(step)
    (step / "manifest.json").write_bytes(bomb)
    with pytest.raises(Refused, match="manifest.json"):
        find(tmp_path / "run")
    (tmp_path / "other" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "other" / "iter_0000001" / "model.pt").write_bytes(bomb)
    assert find(tmp_path / "other") is None
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert cli.main(["inspect", str(tmp_path / "other")]) == 2
    assert cli.main(["inspect", str(tmp_path / "run")]) == 2
    assert not trace.exists() and before == sorted(p.name for p in tmp_path.rglob("*"))


# ---- isotron inspect -----------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_there(capsys: Any) -> None:
    assert cli.main(["inspect", str(FIXTURES / "checkpoint_v2"), "--verify"]) == 0
    out = capsys.readouterr().out
    for part in ("step 2 (updates 2, consumed_samples 4, skipped 0)", "family llama, saved at tp 1, pp 1, dp 1",
                 "weights", "584", "2,336", "rank_00000.safetensors", "exp_avg_sq/", "float32 [8, 8]  256 bytes in 1",
                 "every file is whole"):  # fmt: skip
        assert part in out, part


def test_inspect_gives_json_and_finds_damage(tmp_path: Path, capsys: Any) -> None:
    home = tmp_path / "run"
    shutil.copytree(FIXTURES / "checkpoint_v2", home)
    file = home / "step_00000002" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    words = ["inspect", str(home / "step_00000002"), "--json", "--no-tensors"]
    assert cli.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 2 and "tensors" not in facts and not facts["verified"] and facts["damage"] == []
    assert facts["kinds"]["weights"] == {"tensors": 9, "elements": 584, "bytes": 2336}
    assert cli.main([*words, "--verify"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"] is False and "expected SHA-256" in facts["damage"][0]
    file.write_bytes(data[:-1])
    assert cli.main(words) == 1  # sizes are compared without being asked for
    assert f"found {len(data) - 1}" in json.loads(capsys.readouterr().out)["damage"][0]


def test_inspect_of_a_damaged_manifest_says_it_once_and_names_another_step(tmp_path: Path, capsys: Any) -> None:
    home, older = tmp_path / "run", "step_00000001"
    shutil.copytree(FIXTURES / "checkpoint_v2", home)
    manifest = home / "step_00000002" / "manifest.json"
    whole = manifest.read_text()
    for text, said in (("{", "is damaged, what it holds is no JSON"), ('{"a": 1}', "format: format_version is None")):
        manifest.write_text(text)
        assert cli.main(["inspect", str(home)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("manifest.json") == 1 and said in err
        assert "try:    copy it again from where this checkpoint came" in err
    shutil.copytree(home / "step_00000002", home / older)
    manifest.unlink()
    (home / older / "manifest.json").write_text(whole)
    assert cli.main(["inspect", str(home / "step_00000002")]) == 2
    assert f"manifest.json is missing\ntry:    {home / older}, another step" in capsys.readouterr().err
    assert cli.main(["inspect", str(home), "--no-tensors"]) == 0
    assert "is not complete, looking for another: manifest.json is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "isotron inspect runs/first"), (["nowhere"], "this is not"), (["x", "--frob"], "no such option")],
)
def test_inspect_refuses(words: list[str], said: str, capsys: Any) -> None:
    assert cli.main(["inspect", *words]) == 2
    assert said in capsys.readouterr().err


# ---- renames -------------------------------------------------------------------------------------------------------


def test_a_table_of_renames() -> None:
    table = parse_renames(["a.*.w=b.*.v", "x=y", "old.*=*"])
    assert [renamed(n, table) for n in ("a.3.w", "x", "old.z", "other", "a.w")] == ["b.3.v", "y", "z", "other", "a.w"]


def test_tensors_come_under_their_new_names(tmp_path: Path) -> None:
    old = {"trunk.0": values((3, 2)), "trunk.1": values((2,), seed=1), "head": values((5,), seed=2)}
    source = Renamed(Source(save_one(tmp_path, 1, old)), parse_renames(["trunk.*=layers.*"]))
    assert sorted(source.names()) == ["head", "layers.0", "layers.1"]
    assert source.info("layers.0") == (torch.float32, (3, 2))
    out = torch.empty(2)
    source.read("layers.1", whole((2,)), out)
    assert torch.equal(out, old["trunk.1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trunk.0=head"], "would both be head"),
        (["trink.*=layers.*"], "no tensor of the checkpoint is called so; it has head, trunk.0"),
        (["trunk.*=layers"], "one \\* on both sides"),
        (["trunk"], "OLD=NEW"),
    ],
)
def test_renames_that_are_none_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    step = save_one(tmp_path, 1, {"trunk.0": values((3,)), "head": values((3,))})
    with pytest.raises(Refused, match=said):
        Renamed(Source(step), parse_renames(words))
