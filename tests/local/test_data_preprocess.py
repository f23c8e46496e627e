"""Preprocessing: the same files for any number of workers, counts, places of errors, nothing left after one."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from isotron.core.errors import Refused
from isotron.data.indexed import IndexedDataset
from isotron.data.indexed_writer import merge
from isotron.data.info import read_info
from isotron.data.preprocess import Summary, preprocess
from isotron.progress import progress
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig
from isotron.tokenizers.null import NullTokenizer

ASSETS = Path(__file__).resolve().parents[2] / "assets"
NULL = NullTokenizer(100)


def quiet(_: str) -> None:
    """Log nothing."""


def jsonl(path: Path, texts: list[object], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run(path: Path, output: Path, **options: object) -> Summary:
    options = {"workers": 1, "log": quiet, **options}
    return preprocess([path], output, NULL, **options)  # type: ignore[arg-type]


def tokens(output: Path, key: str = "text") -> list[list[int]]:
    data = IndexedDataset(f"{output}_{key}_document")
    data.check()
    return [data[i].tolist() for i in range(len(data))]


def pair(output: Path, key: str = "text") -> tuple[bytes, bytes]:
    prefix = f"{output}_{key}_document"
    return Path(prefix + ".bin").read_bytes(), Path(prefix + ".idx").read_bytes()


def test_documents_eod_and_empty_texts(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["", "1 2 3", "", " \n ", "4"])
    summary = run(path, tmp_path / "out", append_eod=True)
    assert tokens(tmp_path / "out") == [[1, 2, 3, 99], [4, 99]]
    assert (summary.documents, summary.tokens, summary.empty, summary.bad) == (2, 6, 3, 0)
    assert "2 documents, 6 tokens (uint16)" in str(summary) and "3 empty texts" in str(summary)
    info = read_info(f"{tmp_path / 'out'}_text_document")
    assert info is not None and info["tokenizer"]["vocab_size"] == 100 and info["append_eod"] is True
    run(path, tmp_path / "plain")
    assert tokens(tmp_path / "plain") == [[1, 2, 3], [4]]


def test_array_gz_and_jsonl_give_the_same_files(tmp_path: Path) -> None:
    texts = ["1 2", "3", "4 5 6"]
    run(jsonl(tmp_path / "a.jsonl", list(texts)), tmp_path / "lines")
    (tmp_path / "b.json").write_text(json.dumps([{"text": t} for t in texts], indent=2))
    run(tmp_path / "b.json", tmp_path / "array")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    run(tmp_path / "a.jsonl.gz", tmp_path / "zipped")
    assert pair(tmp_path / "array") == pair(tmp_path / "lines") == pair(tmp_path / "zipped")


def test_several_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "1", "a": "2 3"}\n{"q": "", "a": "4"}\n')
    summary = run(path, tmp_path / "out", json_keys=("q", "a"))
    assert tokens(tmp_path / "out", "q") == [[1]] and tokens(tmp_path / "out", "a") == [[2, 3], [4]]
    assert (summary.documents, summary.empty, len(summary.outputs)) == (3, 1, 2)


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(ASSETS / "demo_tokenizer")))
    inputs = [str(ASSETS / "text" / "valid.jsonl")] * 5  # several batches
    found = []
    for workers in (1, 3):
        preprocess(inputs, tmp_path / str(workers), tokenizer, append_eod=True, workers=workers, log=quiet)
        found.append(pair(tmp_path / str(workers)))
    assert found[0] == found[1]
    first = json.loads((ASSETS / "text" / "valid.jsonl").open(encoding="utf-8").readline())["text"]
    assert tokens(tmp_path / "3")[0] == [*tokenizer.encode(first), tokenizer.eod]


def test_merge_equals_preprocessing_everything_at_once(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path / "a.jsonl", ["1 2", "3"]), jsonl(tmp_path / "b.jsonl", ["", "4 5"])
    for path in (a, b):
        run(path, tmp_path / path.stem)
    preprocess([a, b], tmp_path / "both", NULL, workers=1, log=quiet)
    merge([f"{tmp_path / name}_text_document" for name in "ab"], f"{tmp_path / 'joined'}_text_document")
    assert pair(tmp_path / "joined") == pair(tmp_path / "both")
    notes = [read_info(f"{tmp_path / name}_text_document") for name in ("joined", "both")]
    assert notes[0] == notes[1]


def five_lines(path: Path) -> Path:
    path.write_bytes(b'{"text": "1"}\n{"text": "2"}\n{"text": "ab\n{"text": "3\xe6"}\n{"text": "5"}\n')
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_stop_with_their_place_or_are_skipped(workers: int, tmp_path: Path) -> None:
    path = five_lines(tmp_path / "a.jsonl")
    with pytest.raises(Refused) as refused:
        run(path, tmp_path / "out", workers=workers)
    assert f"{path}:3 (byte 37)" in str(refused.value) and "bad JSON: Unterminated string" in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    said: list[str] = []
    summary = run(path, tmp_path / "out", workers=workers, on_bad_line="skip", log=said.append)
    assert tokens(tmp_path / "out") == [[1], [2], [5]] and summary.bad == 2
    assert f"{path}:4 (byte 52): byte 0xE6 is not UTF-8" in said[1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"txt": "1"}', "no key 'text'; its keys: 'txt'"),
        ("[1]", None),
        ("5", "a record is a JSON object, this is a int"),
        ('{"text": null}', "the value of 'text' is a NoneType"),
        ('{"text": "\\ud83d"}', "half a surrogate pair"),
        ('{"text": "1 x"}', "every word must be an id"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_every_kind_of_bad_record(line: str, why: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n' + line + '\n{"text": "\\ud83d\\ude00", "text": "7"}\n')
    with pytest.raises(Refused) as refused:
        run(path, tmp_path / "out")
    assert f"{path}:2" in str(refused.value) and (why or "object") in str(refused.value)
    assert refused.value.exit_code == 1
    run(path, tmp_path / "out", on_bad_line="skip")
    assert tokens(tmp_path / "out") == [[1], [7]]


def test_records_with_another_key_name_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "7", "n": 5, "content": "1 2"}\n' * 3)
    with pytest.raises(Refused) as refused:
        run(path, tmp_path / "out")
    assert refused.value.problems[0].fix == "--json-keys content" and refused.value.exit_code == 2
    assert run(path, tmp_path / "out", json_keys=("content",)).documents == 3


def test_files_that_are_there_are_replaced_with_a_line(tmp_path: Path) -> None:
    path, said = jsonl(tmp_path / "a.jsonl", ["1 2"]), []  # type: tuple[Path, list[str]]
    run(path, tmp_path / "out", log=said.append)
    assert not any("replaced" in line for line in said)
    run(path, tmp_path / "out", log=said.append)
    assert said[-1] == f"already there, replaced: {tmp_path / 'out'}_text_document.bin/.idx"


def test_many_bad_lines_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 20 + '{"text": "1"}\n')
    said: list[str] = []
    assert run(path, tmp_path / "out", on_bad_line="skip", log=said.append).bad == 20
    assert len(said) == 6 and "the summary counts them" in said[-1]


def test_no_document_is_a_failure_without_outputs(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["", "  "])
    with pytest.raises(Refused, match="no document for .*: 2 empty texts, 0 bad records; nothing was written"):
        run(path, tmp_path / "out")
    path = tmp_path / "b.jsonl"
    path.write_text('{"q": "1", "a": ""}\n')
    with pytest.raises(Refused, match="out_a_document"):
        run(path, tmp_path / "out", json_keys=("q", "a"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_all_bad_options_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        run(tmp_path / "a.jsonl", tmp_path / "out", workers=0, on_bad_line="ignore", json_keys=())
    assert len(refused.value.problems) == 3


def test_a_dead_worker_is_reported(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["1"])
    with pytest.raises(Refused, match="a worker process died") as refused:
        preprocess([path], tmp_path / "out", Deadly(100), workers=2, log=quiet)
    assert refused.value.exit_code == 1 and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


class Deadly(NullTokenizer):
    """Ends the process that encodes."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        import os

        os._exit(3)

    def __reduce__(self) -> tuple[object, ...]:
        return (Deadly, (self.vocab_size,))


def test_plain_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import isotron.progress as module

    monkeypatch.setattr(module, "SECONDS", 0.0)
    said: list[str] = []
    with progress("preprocess", 200, said.append) as report:
        report(100, documents=3, tokens=40)
    assert said[0].startswith("preprocess  50.0%  3 documents  40 tokens")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    said: list[str] = []
    with progress("preprocess", 200, said.append) as report:
        report(200, documents=3, tokens=40)
    assert said == []


def test_preprocessing_loads_no_torch() -> None:
    code = "import sys, isotron.data.preprocess, isotron.tokenizers.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ASSETS.parent, check=False).returncode == 0
