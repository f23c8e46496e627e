"""`isotron score`: the training forward and the cache give the same log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotron import cli
from isotron.commands.score_rank import cached_logprobs
from isotron.core.errors import Refused
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.rows import Row
from tests.evaluation import make_model
from tests.generation import save_run

IDS = [[130, *((7 * i * i + j) % 131 for i in range(n))] for j, n in enumerate((30, 1, 9))]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_both_paths_are_the_same(name):
    model = make_model(name, overlap_grad_reduce=False)
    right = ModelScorer(model, 2)([Row(ids, 1) for ids in IDS])
    for mine, row in zip(cached_logprobs(model, IDS, chunk=4, page=4), right, strict=True):
        assert mine == pytest.approx(row.logprobs, abs=1e-9)


def test_a_difference_would_show():
    """The cache of another model is not this model's."""
    right = ModelScorer(make_model("gpt"), 2)([Row(ids, 1) for ids in IDS])
    other = cached_logprobs(make_model("llama"), IDS, chunk=4, page=4)
    assert (
        max(
            abs(a - b)
            for row, found in zip(right, other, strict=True)
            for a, b in zip(row.logprobs, found, strict=True)
        )
        > 1e-3
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    step = str(save_run("llama", tmp_path))
    words = ["score", "--load", step, "--text", "5 17 99 3 60", "--text", "7 8", "--chunk", "2", "--page", "2"]
    assert cli.main([*words, "--json", "--dtype", "float32", "--tolerance", "1e-5"]) == 0
    first, second, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["tokens"] == [5, 17, 99, 3, 60] and len(second["logprobs"]) == 2
    assert first["logprobs"] == pytest.approx(first["cached_logprobs"], abs=1e-5)
    assert last["max_difference"] == max(first["max_difference"], second["max_difference"]) <= 1e-5
    assert cli.main([*words, "--tolerance", "1e-300"]) in (0, 1)  # 0 only where both are equal to the last bit
    assert "largest difference" in capsys.readouterr().out
    (tmp_path / "a.jsonl").write_text('{"text": "5 17 99 3 60"}\n')
    assert (
        cli.main(["score", "--load", step, "--input", str(tmp_path / "a.jsonl"), "--json", "--dtype", "float32"]) == 0
    )
    again = json.loads(capsys.readouterr().out.splitlines()[0])
    assert again["logprobs"] == pytest.approx(first["logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    "words, case",
    [
        (["--input", "nowhere"], "no such file"),
        (["--chunk", "0"], "one token or more"),
        (["--page", "0", "--chunk", "99999999999"], "(?s)one token or more.*at most 1048576"),
        (["--tolerance", "-1"], "difference in nats"),
        (["--text", ""], "nothing to score"),
        (["--text", " ".join(["5"] * 33)], "32 positions"),
    ],
)
def test_what_is_refused(words, case, tmp_path):
    step = str(save_run("gpt", tmp_path))
    with pytest.raises(Refused, match=case):
        from isotron.commands.score import run

        run(["--load", step, "--text", "5 7", *words] if "--text" not in words else ["--load", step, *words])
