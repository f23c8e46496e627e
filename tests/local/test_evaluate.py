"""Tasks on one process: against loops over `transformers`, the readers of their files, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from isotron import cli
from isotron.core.checkpoint.weights import load_weights
from isotron.core.errors import Refused
from isotron.core.mesh import Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.data.indexed_writer import IndexedWriter
from isotron.evaluate.choices import encoded
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.perplexity import plain
from isotron.evaluate.result import Ratio, mean
from isotron.evaluate.rows import Row, Scored, cut, windows
from isotron.evaluate.tasks import evaluate, read_tasks
from isotron.hub.reader import HFSource
from tests import hf_twins
from tests.evaluation import ROWS, Letters, asked, make_model, scored, write
from tests.generation import save_run


def twin(name: str, directory: Path) -> tuple[Any, ModelScorer]:
    theirs = hf_twins.save(name, directory, torch.float64)
    source = HFSource(directory)
    model = ParallelModel(source.folder.model, Layout(dp=1), Mesh(), torch.float64, torch.device("cpu"), 3)
    load_weights(model, source)
    source.close()
    return theirs, ModelScorer(model, 3)


def reference(theirs: Any, tokens: list[int]) -> torch.Tensor:
    """[n - 1, V]: log-probabilities of what follows each token, one row at a time."""
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def chosen(theirs: Any, tokens: list[int], first: int) -> tuple[list[float], bool]:
    found = reference(theirs, tokens)[first - 1 :]
    said = found.argmax(-1).tolist() == tokens[first:]
    return [float(p[t]) for p, t in zip(found, tokens[first:], strict=True)], said


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelScorer]:
    return twin(request.param, tmp_path_factory.mktemp(request.param))


# ---- against transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [0, 8])
def test_wikitext(both, files, stride):
    theirs, ours = both
    text = files["wikitext103"].read_text()
    tokens, words, width = Letters().encode(plain(text)), len(text.strip().split(" ")), 32
    loss, start, counted = 0.0, 0, 1
    while counted < len(tokens):
        window = tokens[start : start + width + 1]
        loss -= sum(chosen(theirs, window, counted - start)[0])
        counted, start = start + len(window), start + (stride or width)
    found = evaluate(asked("wikitext103", files["wikitext103"], stride=stride), ours)
    assert found.facts["tokens"] == len(tokens) - 1 and found.facts["words"] == words
    assert found.values["loss"].value == pytest.approx(loss / (len(tokens) - 1), abs=1e-6)
    assert found.values["perplexity"].value == pytest.approx(math.exp(loss / (len(tokens) - 1)), rel=1e-6)
    assert found.values["word_perplexity"].value == pytest.approx(math.exp(min(20, loss / (words - 1))), rel=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_lambada(both, files, strict):
    theirs, ours = both
    right, loss = [], 0.0
    for line in files["lambada"].read_text().splitlines():
        text = json.loads(line)["text"]
        letters = len(text.split()[-1]) + 1 if strict else 1
        tokens = Letters().encode(text)[-33:]
        logprobs, exact = chosen(theirs, tokens, len(tokens) - letters)
        right.append(exact)
        loss -= sum(logprobs)
    found = evaluate(asked("lambada", files["lambada"], strict=strict), ours)
    assert found.examples == 7 and found.values["accuracy"].value == sum(right) / 7
    assert found.values["perplexity"].value == pytest.approx(math.exp(loss / 7), rel=1e-6)


def test_documents(both, files, tmp_path):
    theirs, ours = both
    loss, tokens, words, size = 0.0, 0, 0, 0
    pair = IndexedWriter(tmp_path / "pair", 131)
    for line in files["perplexity"].read_text().splitlines():
        text = json.loads(line)["text"]
        ids = Letters().encode(text)
        loss -= sum(chosen(theirs, [130, *ids], 1)[0])
        tokens, words, size = tokens + len(ids), words + len(text.split()), size + len(text.encode())
        pair.add_document(ids)
    pair.close()
    found = evaluate(asked("perplexity", files["perplexity"], width=100), ours)
    values = found.values
    assert found.examples == 5 and found.facts["tokens"] == tokens
    assert values["loss"].value == pytest.approx(loss / tokens, abs=1e-6)
    assert values["word_perplexity"].value == pytest.approx(math.exp(loss / words), rel=1e-6)
    assert values["bits_per_byte"].value == pytest.approx(loss / size / math.log(2), rel=1e-6)
    stored = evaluate(asked("perplexity", tmp_path / "pair", width=100), ours)
    assert stored.values["loss"] == values["loss"] and "word_perplexity" not in stored.values


def test_choices(both, files):
    theirs, ours = both
    right = []
    for line in files["mnli"].read_text().splitlines()[1:]:
        cells = line.split("\t")
        first, second = (c if c.endswith(".") else f"{c}." for c in (cells[8].strip(), cells[9].strip()))
        prompt = Letters().encode(f"{first}\nQuestion: {second} True, False or Neither?\nAnswer:")
        sums = []
        for word in (" True", " Neither", " False"):
            row = [*prompt, *Letters().encode(word)][-65:]
            sums.append(sum(chosen(theirs, row, len(row) - len(word))[0]))
        labels = ["entailment", "neutral", "contradiction"]
        right.append(labels[max(range(3), key=lambda i: sums[i])] == cells[-1])
    found = evaluate(asked("mnli", files["mnli"], width=64), ours)
    assert found.values["accuracy"].value == sum(right) / len(right) and found.examples == 5


class Oracle:
    """Scores rows by a rule that tests can compute: the more often a token is in its row, the likelier."""

    def __call__(self, rows: list[Row]) -> list[Scored]:
        self.rows = rows
        return [Scored([-1.0 / list(r.tokens).count(t) for t in r.tokens[r.first :]], [True] * r.count) for r in rows]


def test_a_gap_in_race_is_filled(files, tmp_path):
    passage = {"article": "They went home.", "questions": ["He was _ then.", "Why?"], "answers": ["B", "A"],
               "options": [["glad", "sad"], ["so", "no"]]}  # fmt: skip
    (tmp_path / "1.txt").write_text(json.dumps(passage))
    oracle = Oracle()
    found = evaluate(asked("race", tmp_path, width=200), oracle)
    texts = ["".join(map(chr, row.tokens)) for row in oracle.rows]
    assert texts[1] == "Article: They went home.\n\nHe was sad then."
    assert texts[2] == "Article: They went home.\n\nQuestion: Why?\nAnswer: so"
    assert found.examples == 2


def test_qqp_counts_f1(files):
    rows = [line.split("\t") for line in files["qqp"].read_text().splitlines()[1:]]
    yes = [float(cells[-1]) for cells in rows]
    always = lambda rows: [Scored([-float(Letters().decode(list(r.tokens)[-2:]) == "no")], [True]) for r in rows]  # noqa: E731
    found = evaluate(asked("qqp", files["qqp"], width=200), always)
    assert found.values["accuracy"].value == sum(yes) / len(yes)
    assert found.values["f1"].value == pytest.approx(2 * sum(yes) / (sum(yes) + len(yes)))


# ---- rows and numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, stride", [(8, 0), (8, 3), (8, 8), (8, 20), (100, 1), (1, 1)])
@pytest.mark.parametrize("length", [2, 8, 9, 10, 31])
def test_windows_count_every_token_once(length, width, stride):
    tokens, seen = list(range(length)), []
    for i, row in enumerate(windows(tokens, width, stride)):
        assert 1 <= row.first < len(row.tokens) <= width + 1
        assert i == 0 or row.first - 1 >= width - min(stride or width, width)
        seen += row.tokens[row.first :]
    assert seen == tokens[1:]


def test_a_long_context_loses_its_beginning():
    assert cut([1, 2, 3, 4], [5, 6], 3) == Row([3, 4, 5, 6], 2)
    assert cut([1, 2], [5, 6], 9) == Row([1, 2, 5, 6], 2)
    assert cut([1, 2], [5, 6, 7], 2) == Row([2, 5, 6], 1)


def test_answers_are_cut_where_both_are_read_together():
    before, after = encoded(Letters(), "ab ", "cd")  # type: ignore[arg-type]
    assert before == Letters().encode("ab") and after == Letters().encode(" cd")


def test_standard_errors():
    assert mean([1.0, 0.0, 1.0, 1.0]).stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert mean([1.0]).stderr is None
    ratio = Ratio()
    parts = [(2.0, 1.0), (9.0, 3.0), (4.0, 2.0)]
    for a, b in parts:
        ratio.add(a, b)
    spread = sum((a - 2.5 * b) ** 2 for a, b in parts)
    assert ratio.value().value == 2.5 and ratio.value().stderr == pytest.approx(math.sqrt(spread * 1.5) / 6)
    assert ratio.value(3.0).value == 5.0 and ratio.value(3.0).stderr == pytest.approx(2 * ratio.value().stderr)


def test_text_of_wikitext_is_running_text():
    assert plain("He 's well @-@ known ( he said ) , at 1 @,@ 000 . \n = = A = = \n") == (
        "He's well-known (he said), at 1,000.\n== A ==\n"
    )


def test_a_row_does_not_feel_its_neighbours():
    together, alone = scored("gpt", {}, 7), scored("gpt", {}, 1)
    for a, b in zip(together, alone, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-12) and a[1] == b[1]


def test_stretched_positions_follow_from_the_row_alone(tmp_path):
    _, ours = twin("phi3", tmp_path)  # its angles change with the longest row of a batch, at 64 positions
    rows = [Row([(5 * i + j) % 131 for i in range(n)], n - 3) for j, n in enumerate((100, 20, 60, 90))]
    for row, found in zip(rows, ours(rows), strict=True):
        assert found.logprobs == pytest.approx(ours([row])[0].logprobs, abs=1e-12)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_a_model_cannot_score_is_refused():
    model = make_model("gpt")
    scorer = ModelScorer(model, 2)
    with pytest.raises(Refused, match="positions"):
        scorer([Row(list(range(34)), 1)])
    with pytest.raises(Refused, match="the token 131"):
        scorer([Row([131, 1], 1)])
    (stage,) = model.stages.values()
    stage.module.norm.weight.data.fill_(torch.nan)
    with pytest.raises(Refused, match="not finite"):
        scorer([Row(*ROWS[0])])


BROKEN = {
    "lambada": ('{"text": "one two"}\n{"words": 1}\n', ":2.*no text"),
    "perplexity": ('{"text": "one two"\n', ":1.*not JSON"),
    "mnli": ("head\na\tb\n", ":2.*2 columns"),
    "qqp": ("head\na\tb\tc\td\te\tmaybe\n", ":2.*label is 'maybe'"),
    "race": ('{"article": "a", "questions": ["q"], "options": [], "answers": ["A"]}', ":1.*lacks"),
    "wikitext103": (" \n", "no text"),
}


@pytest.mark.parametrize("task", BROKEN)
def test_a_file_that_is_not_the_task_s_is_refused_with_its_line(task, tmp_path):
    text, case = BROKEN[task]
    (tmp_path / "file.txt").write_text(text)
    with pytest.raises(Refused, match=f"(?s){case}"):
        evaluate(asked(task, tmp_path / "file.txt"), Oracle())
    (tmp_path / "directory").mkdir()
    with pytest.raises(Refused, match=r"it is a directory|it holds no \.txt file"):
        evaluate(asked(task, tmp_path / "directory"), Oracle())


def test_words_that_ask_for_tasks():
    assert read_tasks(["LAMBADA"], ["a.jsonl"]) == [("lambada", "a.jsonl")]
    assert read_tasks(["qqp=x", "mnli=y"]) == [("qqp", "x"), ("mnli", "y")]
    for words in (["lambda=x"], ["lambada"]):
        with pytest.raises(Refused):
            read_tasks(words)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    step = save_run("gpt", tmp_path)
    lines = [{"text": "5 17 99 3"}, {"text": "60 61 62 3 4"}, {"text": "1 2"}]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = f"{tmp_path / 'ids.jsonl'}"
    words = ["evaluate", "--load", str(step), "--task", f"perplexity={place}", f"lambada={place}", "--strict-lambada"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loss, word = report["results"]
    assert report["checkpoint"] == str(step) and loss["tokens"] == 11 and loss["examples"] == 3
    rows = [[130, *map(int, line["text"].split())] for line in lines]
    right = ModelScorer(make_model("gpt"), 8)([Row(row, 1) for row in rows])
    assert loss["metrics"]["loss"]["value"] == pytest.approx(-sum(s.total for s in right) / 11, abs=1e-9)
    assert word["strict"] and word["metrics"]["accuracy"]["stderr"] is not None
    assert cli.main([*words, "--limit", "2"]) == 0
    assert "word_perplexity" in capsys.readouterr().out
    asked_wrong = ["--task", "perplexity=nowhere", "--seq-length", "99", "--limit", "-1", "--micro-batch-size", "0"]
    assert cli.main(["evaluate", "--load", str(step), *asked_wrong]) == 2
    said = capsys.readouterr().err
    assert said.count("asked:") == 4 and "32 positions" in said and "no such file" in said
    assert cli.main(["evaluate", "--load", str(step)]) == 2 and "without --task" in capsys.readouterr().err
    assert cli.main([*words, "--limit", "9" * 23]) == 2 and "--limit 100" in capsys.readouterr().err


def test_fine_tune_and_score(tmp_path, capsys):
    """A model learns which of two answers is right, from examples that were written for it."""
    sizes = ["--hidden-size", "32", "--num-layers", "2", "--num-attention-heads", "2", "--seq-length", "64"]
    usual = ["--lr", "1e-2", "--micro-batch-size", "4", "--no-tensorboard", "--eval-iters", "0", "--device", "cpu"]
    begun = ["--mock-data", "--tokenizer-model", "assets/demo_tokenizer/tokenizer.json", "--train-iters", "1"]
    step = tmp_path / "begun"
    assert cli.main(["train", *sizes, *usual, *begun, "--save", str(step)]) == 0
    capsys.readouterr()
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    lines = [f"{i}\t1\t2\tking {i}\tking {i if i % 2 else 'queen'}\t{i % 2}" for i in range(20)]
    (tmp_path / "train.tsv").write_text("\n".join([head, *lines]))
    task = ["--task", f"qqp={tmp_path / 'train.tsv'}", "--json"]
    assert cli.main(["evaluate", "--load", str(step), *task, "--examples-to", str(tmp_path / "qqp")]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 20
    words = ["finetune", "--load", str(step), "--data-path", str(tmp_path / "qqp"), "--save", str(tmp_path / "tuned")]
    assert cli.main([*words, *usual, "--train-iters", "150", "--global-batch-size", "4", "--split", "100,0,0"]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", "--load", str(tmp_path / "tuned"), *task]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["metrics"]["accuracy"]["value"] >= 0.9, (tmp_path / "tuned" / "metrics.jsonl").read_text()[-900:]
    assert cli.main(["evaluate", "--load", str(step), "--task", "perplexity=x", "--examples-to", "y"]) == 2
    assert "of one task are written" in capsys.readouterr().err
