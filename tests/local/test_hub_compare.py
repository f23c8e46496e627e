"""isotron compare: equal models, ours against `transformers`, the first layer that differs, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from safetensors.torch import load_file, save_file

from isotron.commands import compare
from isotron.commands.convert import run_meta
from isotron.core.errors import Refused
from isotron.hub.convert import convert
from isotron.hub.folder import is_folder
from isotron.hub.locate import is_hub_name, local_path
from tests.hf_twins import save

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


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
    words = {"once": 0, "upon": 1, "a": 2, "time": 130, "<unk>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "a" / "tokenizer.json"))
    given = ["--text", "once upon a time", "--json", "--tolerance", "9"]
    assert compare.run([str(tmp_path / "a"), str(tmp_path / "b"), *given]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["what"] for r in rows if r["difference"]] == ["layer 1", "layer 2", "final norm", "logits"]


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


OFFLINE = """
import sys
from isotron.config.resume import find_checkpoint
from isotron.core.errors import Refused
from isotron.hub.reader import HFSource
for name in sys.argv[1:]:
    try:
        found = find_checkpoint(name, "")
        HFSource(found.path)
        print(found.path, found.weights_only)
    except Refused as refused:
        print(str(refused).replace(chr(10), " | "))
"""


def test_the_cache_of_the_hub_without_a_network(tmp_path: Path) -> None:
    """Two revisions as the library's own cache keeps them; nothing else is known, and nobody is asked."""
    pytest.importorskip("huggingface_hub")
    place = tmp_path / "hub" / "models--org--name"
    first, second, third = ("1" * 40, "2" * 40, "3" * 40)
    for commit, reference in ((first, "main"), (second, "v2"), (third, "halves")):
        save("llama", place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / reference).write_text(commit)
    (place / "snapshots" / third / "model.safetensors").unlink()
    surroundings = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"),
                    "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
    names = ("org/name", "org/name@v2", f"org/name@{second}", "org/name@halves", "org/name@v3", "org/other")
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *names],
        cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"{place / 'snapshots' / commit} True" for commit in (first, second, second)]
    assert "it holds no model.safetensors and no index of several | try:" in lines[3]
    for name, line in zip(names[4:], lines[4:], strict=True):
        assert line.startswith(f"asked:  --load {name} | but:") and "the hub gave nothing" in line and "| try:" in line
