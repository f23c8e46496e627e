"""Random and damaged bytes into every reader: an answer or a refusal in three lines, never anything else."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isotron.core.errors import Refused
from isotron.data.encode import Encoder
from isotron.data.indexed import IndexedDataset, bin_path, idx_path
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.records import Share, read_batches
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TYPES, TokenizerConfig
from isotron.tokenizers.null import NullTokenizer

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECES = st.sampled_from(
    [
        b'{"text": "1 2"}',
        b"\n",
        b"[",
        b"]",
        b",",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\r\n",
        b" ",
        b"null",
    ]
    + [b'{"text": 5}', b'{"text": "\\ud800"}', b"1e999", b"9" * 5000, b"[" * 3000, b'{"text": "7"}\n', b"NaN", b"\x00"]
)
TEXT = st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=20).map(b"".join))


@QUICK
@given(raw=TEXT, count=st.integers(1, 4))
def test_the_record_reader_takes_any_bytes(raw: bytes, count: int) -> None:
    encoder = Encoder(NullTokenizer(100), ("text",), True)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.jsonl"
        path.write_bytes(raw)
        whole = [r.raw for b in read_batches([path]) for r in b.records]
        shares = [r.raw for i in range(count) for b in read_batches([path], share=Share(i, count)) for r in b.records]
        assert shares == whole
        for batch in read_batches([path], max_records=3):
            made = encoder(batch)
            (column,) = made.columns
            assert len(column.sequences) + made.empty + len(made.bad) == len(batch.records)
            assert int(column.lengths.sum()) == len(column.ids)
            assert all(bad.why and bad.where.startswith(str(path)) for bad in made.bad)


@QUICK
@given(
    raw=st.binary(min_size=1, max_size=400), ending=st.sampled_from([".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"])
)
def test_compressed_files_and_tables_of_any_bytes_are_refused(raw: bytes, ending: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("zstandard")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"a{ending}"
        path.write_bytes(raw)
        with pytest.raises(Refused, match="damaged|not a readable"):
            list(read_batches([path]))


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 101), new=st.binary(min_size=1, max_size=12), cut=st.integers(0, 102), keep=st.booleans())
def test_any_damage_of_an_index_is_an_answer_or_a_refusal(at: int, new: bytes, cut: int, keep: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "a"
        with IndexedWriter(prefix, 100) as writer:
            for ids in ([1], [2, 3], [4]):
                writer.add_document(ids)
        raw = bytearray(idx_path(prefix).read_bytes())
        raw[at : at + len(new)] = new
        idx_path(prefix).write_bytes(raw if keep else raw[:cut])
        try:
            data = IndexedDataset(prefix)
            data.check()
        except Refused as refused:
            assert refused.problems[0].case
            return
        tokens = [data[i].tolist() for i in range(len(data))]
        assert sum(map(len, tokens)) == data.tokens <= bin_path(prefix).stat().st_size


@settings(max_examples=40, deadline=None)
@given(
    raw=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
            lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(
                ["model", "type", "vocab", "merges", "BPE", "added_tokens", "content", "id", "pre_tokenizer", "a", "b"]
            ), inner, max_size=5)),
            max_leaves=12,
        ).map(lambda v: json.dumps(v).encode()),
    ),
    kind=st.sampled_from(list(TYPES[1:-1])),
)  # fmt: skip
def test_tokenizer_files_of_any_bytes_are_refused(raw: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.bin"
        path.write_bytes(raw)
        config = TokenizerConfig(kind, str(path), vocab_file=str(path), merge_file=str(path))
        try:
            made = build_tokenizer(config)
        except Refused as refused:
            assert refused.problems[0].fix
            return
        assert isinstance(made.encode("a b"), list)
