"""isotron compare: equal models, ours against `transformers`, the first layer that differs, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from isotron.commands import compare
from isotron.commands.convert import run_meta
from isotron.core.errors import Refused
from isotron.hub.convert import convert
from isotron.hub.folder import is_folder
from isotron.hub.locate import is_hub_name, local_path
from tests.hf_twins import save

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "neox"])
def test_ours_against_theirs_and_a_converted_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(name, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "isotron", run_meta)
    assert compare.run([str(tmp_path / "hf"), "transformers", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["what"] for r in rows] == ["embedding", "layer 0", "layer 1", "final norm", "logits"]
    assert compare.run([str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert "both compute the same" in capsys.readouterr().out


def test_the_first_layer_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama", tmp_path / "a")
    save("llama", tmp_path / "b")
    file = tmp_path / "b" / "model.safetensors"
    found = load_file(file)
    found["model.layers.1.mlp.down_proj.weight"][3, 4] += 0.5
    save_file(found, file, metadata={"format": "pt"})
    assert compare.run([str(tmp_path / "a"), str(tmp_path / "b"), "--tokens", "20"]) == 1
    out = capsys.readouterr().out
    assert "they part at: layer 1, by" in out and out.count("differs") == 4


def test_refusals(tmp_path: Path) -> None:
    save("llama", tmp_path / "a")
    save("gpt2", tmp_path / "b")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for words, part in (
        ([a], "it takes two models"),
        ([a, b, "--tokens", "1"], "tokens must be 2 or more"),
        ([a, str(tmp_path / "nowhere")], "neither a checkpoint nor"),
        ([a, a, "--text", "word"], "tokenizer"),
    ):
        with pytest.raises(Refused, match=part):
            compare.run(words)


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/name") and is_hub_name("org/na-me.2@v1.0")
    (tmp_path / "runs").mkdir()
    assert not any(map(is_hub_name, ("runs/first", "name", "/org/name", "./org/name", "a/b/c", "org/na me")))
    library = pytest.importorskip("huggingface_hub")
    save("llama", tmp_path / "cached")
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if name == "org/gone":
            raise OSError("no network\nmore")
        return str(tmp_path / "cached")

    monkeypatch.setattr(library, "snapshot_download", download)
    assert is_folder(local_path("org/name@abc")) and asked == [("org/name", "abc")]
    with pytest.raises(Refused, match="the hub gave nothing: no network"):
        local_path("org/gone")
