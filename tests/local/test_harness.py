"""The lm-eval harness on a tiny model, with a task of local files; its own numbers are ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = pytest.mark.slow  # it loads for half a minute

from isotron import cli  # noqa: E402
from isotron.commands.evaluate import run  # noqa: E402
from isotron.core.errors import Refused  # noqa: E402
from isotron.evaluate.model import ModelScorer  # noqa: E402
from isotron.evaluate.rows import Row  # noqa: E402
from tests.evaluation import make_model  # noqa: E402
from tests.generation import make_engine, save_run  # noqa: E402

CHOICE = """task: ids_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
"""
CONTINUE = """task: ids_continue
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["~"], max_gen_toks: 3}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    docs = []
    for i in range(5):
        question = " ".join(str((7 * i + j) % 130) for j in range(4))
        (answer,) = make_engine("gpt").generate([list(map(int, question.split()))], 3).tokens
        answer = answer[: answer.index(130)] if 130 in answer else answer
        text = "".join(f" {token}" for token in answer) if i % 2 else "1 2 3"
        docs.append({"question": question, "choices": ["5", "17", f"{i}"], "right": i % 3, "answer": text})
    (tmp_path / "docs.json").write_text("\n".join(map(json.dumps, docs)))
    for name, text in (("choice", CHOICE), ("continue", CONTINUE)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=tmp_path / "docs.json"))
    return tmp_path


def test_tasks_of_the_harness(tasks, tmp_path, capsys):
    step = save_run("gpt", tmp_path)
    words = ["evaluate", "--load", str(step), "--json", "--harness-path", str(tasks)]
    assert cli.main([*words, "--task", "harness=ids_choice", "harness=ids_continue"]) == 0
    choice, continued = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    docs = [json.loads(line) for line in (tasks / "docs.json").read_text().splitlines()]
    scorer = ModelScorer(make_model("gpt"), 8)
    right = 0
    for doc in docs:
        before = list(map(int, doc["question"].split()))
        sums = [s.total for s in scorer([Row([*before, int(c)], len(before)) for c in doc["choices"]])]
        right += max(range(3), key=lambda i: sums[i]) == doc["right"]
    assert choice["examples"] == 5 and choice["metrics"]["acc"]["value"] == right / 5
    assert choice["metrics"]["acc"]["stderr"] is not None
    assert continued["metrics"]["exact_match"]["value"] >= 0.4  # every second answer is what the engine says
    with pytest.raises(Refused, match="lm-eval says"):
        run([*words[1:], "--task", "harness=no_such_task"])
    assert os.environ.get("RANK") is None
