"""Preprocessing from every kind of input, in parts, in sentences, cut short, and on after a kill: the same bytes."""

from __future__ import annotations

import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isotron import cli
from isotron.core.errors import Refused
from isotron.data import journal as journal_module
from isotron.data import preprocess as module
from isotron.data.indexed import IndexedDataset
from isotron.data.inputs import expand
from isotron.data.partitions import join
from isotron.data.preprocess import Summary, preprocess
from isotron.data.records import Share, read_batches
from isotron.data.sentences import split_sentences
from isotron.tokenizers.null import NullTokenizer

ROOT = Path(__file__).resolve().parents[2]
NULL = NullTokenizer(100)
TEXTS = [f"{i % 90} {i % 7}" if i % 5 else "" for i in range(40)]


def quiet(_: str) -> None:
    """Log nothing."""


def lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


def run(inputs: list[Path], output: Path, **options: object) -> Summary:
    options = {"workers": 1, "log": quiet, **options}
    return preprocess(inputs, output, NULL, **options)  # type: ignore[arg-type]


def pair(output: Path, name: str = "text_document") -> tuple[bytes, bytes]:
    return Path(f"{output}_{name}.bin").read_bytes(), Path(f"{output}_{name}.idx").read_bytes()


@pytest.fixture
def wanted(tmp_path: Path) -> tuple[bytes, bytes]:
    run([lines(tmp_path / "plain.jsonl")], tmp_path / "plain")
    return pair(tmp_path / "plain")


def test_zst_of_several_frames(tmp_path: Path, wanted: tuple[bytes, bytes]) -> None:
    zstandard = pytest.importorskip("zstandard")
    raw = lines(tmp_path / "a.jsonl").read_bytes()
    frames = zstandard.compress(raw[:500]) + zstandard.compress(raw[500:])
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames)
    run([path], tmp_path / "zst")
    assert pair(tmp_path / "zst") == wanted
    for name, damaged in (("short", frames[:-5]), ("none", raw), ("flipped", frames[:20] + b"\xff\xff" + frames[22:])):
        path = tmp_path / f"{name}.jsonl.zst"
        path.write_bytes(damaged)
        with pytest.raises(Refused, match=f"{name}.jsonl.zst\n.*the compressed file is damaged"):
            run([path], tmp_path / name)


def test_parquet_and_the_directories_of_datasets(tmp_path: Path, wanted: tuple[bytes, bytes]) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table({"id": list(range(40)), "text": TEXTS, "more": [[1, 2]] * 40})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    run([tmp_path / "a.parquet"], tmp_path / "parquet")
    assert pair(tmp_path / "parquet") == wanted
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    for name, part, file in (("b", table.slice(0, 30), False), ("a", table.slice(30), True)):
        with arrow.OSFile(str(saved / f"{name}.arrow"), "wb") as sink:
            new = arrow.ipc.new_file if file else arrow.ipc.new_stream
            with new(sink, table.schema) as writer:
                writer.write_table(part, max_chunksize=4)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}')
    run([saved], tmp_path / "arrow")
    assert pair(tmp_path / "arrow") == wanted
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(Refused, match="it holds several parts: train\ntry: .*saved/train"):
        expand([tmp_path / "saved"])
    (saved / "a.arrow").unlink()
    with pytest.raises(Refused, match="a.arrow, which is not there"):
        expand([saved])
    (saved / "state.json").write_text("{}")
    with pytest.raises(Refused, match="state.json lists no files"):
        expand([saved])


def test_bad_rows_and_bad_tables_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["1", None, "3"]}), path)
    with pytest.raises(Refused, match="a.parquet, row 2\n.*the value of 'text' is a NoneType"):
        run([path], tmp_path / "out")
    assert run([path], tmp_path / "out", on_bad_line="skip").documents == 2
    with pytest.raises(Refused, match="the record has no key 'body'"):
        run([path], tmp_path / "out", json_keys=("body",))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(Refused, match="not a readable parquet file"):
        run([path], tmp_path / "out")
    (tmp_path / "b.arrow").write_bytes(b"not arrow at all, not at all")
    with pytest.raises(Refused, match="not a readable arrow file"):
        run([tmp_path / "b.arrow"], tmp_path / "out")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_parts_joined_are_the_whole(count: int, tmp_path: Path) -> None:
    inputs = [lines(tmp_path / "a.jsonl"), tmp_path / "b.json", lines(tmp_path / "c.jsonl", TEXTS[:9])]
    inputs[1].write_text(json.dumps([{"text": text} for text in TEXTS]))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(inputs[0].read_bytes()))
    inputs.append(tmp_path / "d.jsonl.gz")
    run(inputs, tmp_path / "whole", append_eod=True)
    for index in range(count):
        run(inputs, tmp_path / "parts", append_eod=True, share=Share(index, count))
    if count > 1:
        join(tmp_path / "parts", count, ["text_document"])
        assert pair(tmp_path / "parts") == pair(tmp_path / "whole")
        notes = [Path(f"{tmp_path / n}_text_document.info.json").read_text() for n in ("parts", "whole")]
        assert notes[0] == notes[1]


def test_every_cut_of_a_file_gives_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n\n{"b":22}\r\n  \n{"c":333}\n{"d":4}')
    every = [r.raw for b in read_batches([path]) for r in b.records]
    for count in range(1, path.stat().st_size + 3):
        shares = [Share(index, count) for index in range(count)]
        assert [r.raw for s in shares for b in read_batches([path], share=s) for r in b.records] == every


def test_a_bad_line_in_a_later_part_has_its_own_number(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl")
    with path.open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(Refused, match=r"a.jsonl:41 \(byte \d+\)"):
        run([path], tmp_path / "out", share=Share(3, 4))


def test_merging_parts_names_those_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(lines(tmp_path / "a.jsonl")), str(tmp_path / "out")
    words = ["preprocess", "--input", path, "--output-prefix", out, "--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", "100", "--partitions", "2"]
    assert cli.main([*words, "--partition", "1"]) == 0
    assert cli.main(["preprocess", "--output-prefix", out, "--partitions", "2", "--merge-partitions"]) == 2
    assert "1 of 2 parts of text_document are not there: 0" in capsys.readouterr().err
    assert cli.main([*words, "--partition", "0"]) == 0
    assert cli.main(["preprocess", "--output-prefix", out, "--partitions", "2", "--merge-partitions", "--json"]) == 0
    merged = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert merged == {"outputs": [f"{out}_text_document"], "documents": 32, "tokens": 64}
    assert cli.main([*words]) == 0 and "the same bytes" in capsys.readouterr().err
    two = [f"{out}_text_document"] * 2
    assert cli.main(["preprocess", "--merge", *two, "--output-prefix", str(tmp_path / "twice")]) == 0
    assert IndexedDataset(tmp_path / "twice").documents == 64
    assert cli.main(["preprocess", "--merge", *two, "--merge-partitions"]) == 2
    said = capsys.readouterr().err
    assert "--output-prefix not given" in said and "--merge joins token files" in said
    for bad in (
        ["--partitions", "2", "--partition", "2"],
        ["--partition", "0", "--max-documents", "3"],
        ["--max-documents", "-1"],
    ):
        assert cli.main([*words, *bad]) == 2
    said = capsys.readouterr().err
    assert "numbered 0 to 1" in said and "not known to a part" in said and "0 for all" in said


def test_parts_without_any_document_are_no_output(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["", " "])
    for index in range(2):
        assert run([path], tmp_path / "out", share=Share(index, 2)).documents == 0
    with pytest.raises(Refused, match="none of the parts of text_document holds a document"):
        join(tmp_path / "out", 2, ["text_document"])


class Tired(NullTokenizer):
    """Interrupted in the middle of its work, `left` batches on."""

    left = 5

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().encode_batch(texts)


@pytest.mark.parametrize("left", [0, 1, 5])
def test_an_interrupted_job_goes_on_and_gives_the_same_files(
    left: int, tmp_path: Path, wanted: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SECONDS", 0.0)
    monkeypatch.setattr(module, "read_batches", functools.partial(read_batches, max_records=4))
    path, tired = tmp_path / "plain.jsonl", Tired(100)
    tired.left = left
    with pytest.raises(KeyboardInterrupt):
        preprocess([path, path], tmp_path / "out", tired, workers=1, log=quiet)
    assert (tmp_path / "out.preprocess.json").exists() is (left > 0)
    said: list[str] = []
    summary = run([path, path], tmp_path / "out", log=said.append)
    assert any(f"going on behind {4 * left} records" in line for line in said) is (left > 0)
    assert (summary.records, summary.documents, summary.empty) == (80, 64, 16)
    run([path, path], tmp_path / "twice")
    assert pair(tmp_path / "out") == pair(tmp_path / "twice")
    assert not list(tmp_path.glob("out*.part")) and not (tmp_path / "out.preprocess.json").exists()


def test_a_job_over_other_input_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SECONDS", 0.0)
    path = lines(tmp_path / "a.jsonl")
    with path.open("a") as stream:
        stream.write("{broken\n")
    monkeypatch.setattr(module, "read_batches", functools.partial(read_batches, max_records=4))
    with pytest.raises(Refused, match="a.jsonl:41"):
        run([path], tmp_path / "out")
    assert (tmp_path / "out.preprocess.json").exists()
    said: list[str] = []
    assert run([path], tmp_path / "out", on_bad_line="skip", log=said.append).bad == 1
    assert "going on behind 40 records" in said[0]  # what to do about bad records is no other job
    with pytest.raises(Refused, match="a.jsonl:41"):
        run([path], tmp_path / "out")
    lines(path)
    said.clear()
    assert run([path], tmp_path / "out", log=said.append).documents == 32
    assert not any("going on" in line for line in said)


def test_two_jobs_never_write_one_output(tmp_path: Path) -> None:
    from isotron.data.indexed_writer import IndexedWriter

    path = lines(tmp_path / "a.jsonl")
    first = IndexedWriter(f"{tmp_path / 'out'}_text_document", 100, resumable=True)
    with pytest.raises(Refused, match="another process is writing it"):
        run([path], tmp_path / "out")
    first.abort()
    assert run([path], tmp_path / "out").documents == 32


KILLED = """
import sys
from pathlib import Path
from isotron.data import journal, preprocess as module
from isotron.data.preprocess import preprocess
from isotron.tokenizers.null import NullTokenizer
if __name__ == "__main__":
    journal.SECONDS = 0.1
    preprocess([sys.argv[1]], sys.argv[2], NullTokenizer(100), workers=2)
"""


def test_a_killed_job_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    line = json.dumps({"text": "1 2 3 " * 200}) + "\n"
    path.write_text(line * 40_000)
    script = tmp_path / "job.py"
    script.write_text(KILLED)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([sys.executable, str(script), str(path), str(tmp_path / "out")], env=env)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.preprocess.json").exists() and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.02)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert children and not Path(f"{tmp_path / 'out'}_text_document.idx").exists()
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    path.write_text(path.read_text())  # touched: it is another input now
    assert run([path], tmp_path / "out", max_documents=7).documents == 7


def test_limits_are_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["1 2 3 4 5", "", "1", "1 2 3 4", "7"])
    summary = run([path], tmp_path / "out", append_eod=True, max_document_tokens=3, max_documents=4)
    data = IndexedDataset(f"{tmp_path / 'out'}_text_document")
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 3, 99], [1, 99], [1, 2, 3, 99]]
    assert (summary.records, summary.truncated, summary.empty) == (4, 2, 1)
    assert "2 documents truncated" in str(summary) and "of 4 records" in str(summary)


def test_sentences_are_sequences_of_their_document(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["1 2\n\n3 4", "", "5", "6\n\n7 8 9\n\n1"])
    summary = run([path], tmp_path / "out", append_eod=True, split_sentences=True)
    data = IndexedDataset(f"{tmp_path / 'out'}_text_sentence")
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2], [3, 4, 99], [5, 99], [6], [7, 8, 9], [1, 99]]
    assert data.document_indices.tolist() == [0, 2, 3, 6] and summary.documents == 3
    run([path], tmp_path / "cut", append_eod=True, split_sentences=True, max_document_tokens=2)
    data = IndexedDataset(f"{tmp_path / 'cut'}_text_sentence")
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 99], [5, 99], [6], [7, 99]]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Mr. Smith met Dr. J. R. Jones. They left.", ["Mr. Smith met Dr. J. R. Jones.", "They left."]),
        ('He said "No." Then he left.', ['He said "No."', "Then he left."]),
        ("It costs 3.50 e.g. here... and so on. Next", ["It costs 3.50 e.g. here... and so on.", "Next"]),
        ("A title\n\nA text\nover lines. End", ["A title", "A text over lines.", "End"]),
        ("\u4e00\u3002\u4e8c\uff01\u4e09", ["\u4e00\u3002", "\u4e8c\uff01", "\u4e09"]),
        ("So did I. You too.", ["So did I.", "You too."]),
        ("  ", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences
    kept = split_sentences(text, keep_newlines=True)
    assert "".join(kept).strip() == text.strip() and len(kept) == len(sentences)


@pytest.mark.parametrize(
    ("lang", "text", "count"),
    [
        ("german", "Am 3. Mai kam Dr. Weiß mit Fr. Groß, z.B. Brot bzw. Bier. Dann ging er.", 2),
        ("english", "Am 3. Mai kam er.", 2),
        ("french", "M. Dupont, av. Foch, cf. Mme. Curie. Il part.", 2),
        ("spanish", "La Sra. Paz y Ud. Juan vive en la avda. Colón. Se va.", 2),
        ("italian", "Il Sig. Rossi e il Dott. Bianchi. Vanno.", 2),
        ("portuguese", "O Sr. Silva e a Dra. Costa. Foram.", 2),
        ("dutch", "Dhr. Jansen, bijv. Piet en mevr. De Vries. Zij gaan.", 2),
    ],
)
def test_sentences_of_a_language(lang: str, text: str, count: int, tmp_path: Path) -> None:
    assert len(split_sentences(text, language=lang)) == count


def test_the_language_reaches_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "a.jsonl", ["Am 3. Mai."])
    words = ["preprocess", "--input", str(tmp_path / "a.jsonl"), "--split-sentences"]
    words += ["--tokenizer-model", str(ROOT / "assets" / "demo_tokenizer")]
    found = []
    for lang in ("english", "german"):
        assert cli.main([*words, "--output-prefix", str(tmp_path / lang), "--lang", lang]) == 0
        found.append(len(IndexedDataset(tmp_path / f"{lang}_text_sentence")))
    assert found == [2, 1]
    assert cli.main([*words, "--output-prefix", str(tmp_path / "o"), "--lang", "klingon"]) == 2
    assert "english, german" in capsys.readouterr().err


MEMORY = """
import re, resource, sys
from isotron.data.preprocess import preprocess
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig
if __name__ == "__main__":
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=sys.argv[3]))
    preprocess([sys.argv[1]], sys.argv[2], tokenizer, workers=2, log=lambda _: None)
    # the rusage of this process begins with what its parent had when it forked; its own peak does not
    own = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    script, peaks = tmp_path / "job.py", []
    script.write_text(MEMORY)
    text = (ROOT / "assets" / "text" / "train.jsonl").read_bytes()
    for times in (10, 20):  # 50 and 100 MB
        with (tmp_path / "a.jsonl").open("wb") as file:
            file.writelines([text] * times)
        words = [sys.executable, str(script), str(tmp_path / "a.jsonl"), str(tmp_path / "out")]
        words.append(str(ROOT / "assets" / "demo_tokenizer"))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        peaks.append(int(subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] < 1.1 * peaks[0] and peaks[1] < 600_000  # KB
