"""Reading records: places, JSON arrays in chunks, compressed files, and what is refused."""

from __future__ import annotations

import gzip
import json
from io import BytesIO
from pathlib import Path

import pytest

from isotron.core.errors import Refused
from isotron.data.inputs import expand
from isotron.data.records import _array_elements, _ArrayScanner, read_batches


def records(path: Path) -> list[tuple[int, int, bytes]]:
    return [(r.line, r.offset, r.raw.strip()) for batch in read_batches([path]) for r in batch.records]


def test_lines_have_places_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n\n  \n{"a":"\xc3\xa9"}\r\n{"a":3}')
    assert records(path) == [(1, 3, b'{"a":1}'), (4, 15, b'{"a":"\xc3\xa9"}'), (5, 27, b'{"a":3}')]
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as stream:
        stream.write(path.read_bytes())
    assert records(tmp_path / "a.jsonl.gz") == records(path)


ARRAYS = [
    [],
    [{"text": "a"}],
    [{"text": 'br[ack]ets, "quotes" {in} \\ text'}, {"text": "", "more": [1, {"x": [2]}]}, 5, "s,]", None],
    [{"text": "x" * 300, "n": list(range(50))} for _ in range(20)],
]


@pytest.mark.parametrize("values", ARRAYS)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("step", [1, 7, 64, 100_000])
def test_array_elements_do_not_depend_on_the_chunks(values: list[object], indent: int | None, step: int) -> None:
    raw = (" \n" + json.dumps(values, indent=indent) + "\n ").encode()
    scanner, found = _ArrayScanner(0), []
    for start in range(0, len(raw), step):
        scanner.feed(raw[start : start + step])
        if not scanner.closed:
            found += list(scanner.scan())
    assert [json.loads(r.raw) for r in found] == values and scanner.closed == b"]"
    for record in found:
        assert raw[record.offset :].startswith(record.raw)
        assert record.line == 1 + raw.count(b"\n", 0, record.offset)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'[{"a": 1}, {"a"', "the file ends inside its JSON array"),
        (b'[{"a": 1}', "the file ends inside its JSON array"),
        (b'[{"a": 1}] {"a": 2}', "there is more text after the end"),
        (b'[{"a": 1}, 2}', "ends with } instead of ]"),
    ],
)
def test_broken_arrays_end_with_a_problem(raw: bytes, problem: str) -> None:
    last = list(_array_elements(BytesIO(raw), 0))[-1]
    assert problem in last.problem


def test_an_element_larger_than_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    texts = ["x" * 3_000_000, "short", "\\" * 1_500_000]
    path.write_text(json.dumps([{"text": text} for text in texts]))
    assert [json.loads(raw)["text"] for _, _, raw in records(path)] == texts


def test_batches_are_bounded_and_keep_the_order(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": "{name}{i}"}}\n' for i in range(10)))
    paths = expand([str(tmp_path / "*.jsonl")])
    batches = list(read_batches(paths, max_records=4))
    assert [len(b.records) for b in batches] == [4, 4, 2, 4, 4, 2]
    assert batches[-1].position == sum(p.stat().st_size for p in paths)
    assert all(len(b.records) == 1 for b in read_batches(paths, max_bytes=5))


def test_refused_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "odd[1].jsonl").write_text("{}\n")
    for given, said in (
        (["/nowhere/a.jsonl"], "no such file: /nowhere/a.jsonl"),
        ([str(tmp_path / "*.json")], "no such file"),
        ([str(tmp_path)], "it is a directory"),
        ([str(tmp_path / "a.txt")], "inputs end in .jsonl, .json, .ndjson"),
        ([str(tmp_path / "empty.jsonl")], "the file is empty"),
        ([], "nothing to preprocess"),
    ):
        with pytest.raises(Refused) as refused:
            expand(given)
        assert said in str(refused.value)
    with pytest.raises(Refused, match=r"json.dumps.*a.txt > a.jsonl for plain text"):
        expand([str(tmp_path / "a.txt")])
    assert expand([tmp_path / "odd[1].jsonl"]) == [tmp_path / "odd[1].jsonl"]


def test_damaged_compressed_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "abc"}\n' * 1000)
    for name, raw in (("short", whole[:-20]), ("none", b'{"text": "abc"}\n')):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(raw)
        with pytest.raises(Refused, match="the compressed file is damaged"):
            records(path)
