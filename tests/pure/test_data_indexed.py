"""The .bin/.idx files: exact bytes, every refusal, 64-bit pointers, merging."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from isotron.core.errors import Refused
from isotron.data import indexed
from isotron.data.build import build_segments
from isotron.data.config import DataConfig
from isotron.data.indexed import IndexedDataset, bin_path, dtype_for, idx_path
from isotron.data.indexed_writer import IndexedWriter, merge, pointers
from isotron.data.info import read_info, write_info


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 100) -> Path:
    with IndexedWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def test_exact_bytes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 99]])
    assert bin_path(prefix).read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 99)
    want = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    want += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert idx_path(prefix).read_bytes() == want
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_reading_back(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", [[1, 2, 3], [4], [5, 99]]))
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 3], [4], [5, 99]]
    assert data.get(0, 1).tolist() == [2, 3] and data.get(0, 1, 1).tolist() == [2]
    assert (data.documents, data.tokens, data.modes) == (3, 6, None)
    data.check()


def test_documents_in_bulk_and_of_several_sequences(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4], [5, 99]])
    with IndexedWriter(tmp_path / "b", 100) as writer:
        writer.add_documents(np.array([1, 2, 3, 4, 5, 99]), np.array([3, 1, 2]))
    assert idx_path(tmp_path / "b").read_bytes() == idx_path(tmp_path / "a").read_bytes()
    with IndexedWriter(tmp_path / "c", 100) as writer:
        writer.add_document([1, 2, 3], lengths=[1, 2])
    data = IndexedDataset(tmp_path / "c")
    assert (len(data), data.documents, data.document_indices.tolist()) == (2, 1, [0, 2])


def test_types_and_ranges(tmp_path: Path) -> None:
    assert dtype_for(65499) is np.uint16 and dtype_for(65500) is np.int32
    data = IndexedDataset(write(tmp_path / "wide", [[65535, 65536, 70000]], 70001))
    assert data.dtype.name == "int32" and data[0].tolist() == [65535, 65536, 70000]
    for ids, said in (([100], "0..99"), ([-1], "ids >= 0")):
        with pytest.raises(Refused, match=said):
            write(tmp_path / "bad", [[1], ids])
    with (
        pytest.raises(Refused, match="token id 65536 .*\n.*0..65535: stored as uint16"),
        IndexedWriter(tmp_path / "bad", dtype=np.uint16) as writer,
    ):
        writer.add_document([65536])
    with pytest.raises(TypeError, match="integers"), IndexedWriter(tmp_path / "bad") as writer:
        writer.add_document(np.array([1.5]))  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["wide.bin", "wide.idx"]


def test_an_error_keeps_what_was_there(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2]])
    before = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    with pytest.raises(RuntimeError), IndexedWriter(prefix, 100) as writer:
        writer.add_document([7])
        raise RuntimeError("stop")
    assert (idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()) == before
    with pytest.raises(Refused, match="nothing to write"):
        write(prefix, [])
    assert (idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()) == before


def test_pointers_pass_32_bits(tmp_path: Path) -> None:
    half = 2**30 + 5
    blocks = [np.array([half, half], dtype=np.int32), np.array([3], dtype=np.int32)]
    assert [p.tolist() for p in pointers(iter(blocks), 2)] == [[0, 2 * half], [4 * half]]
    prefix = write(tmp_path / "big", [[1], [2], [7, 8, 9]])
    raw = bytearray(idx_path(prefix).read_bytes())
    raw[34:46] = struct.pack("<3i", half, half, 3)
    raw[46:70] = struct.pack("<3q", 0, 2 * half, 4 * half)
    idx_path(prefix).write_bytes(raw)
    with bin_path(prefix).open("wb") as stream:  # sparse: 4 GiB that take no disk
        stream.seek(4 * half)
        stream.write(struct.pack("<3H", 7, 8, 9))
    data = IndexedDataset(prefix)
    assert data[2].tolist() == [7, 8, 9] and data.tokens == 2 * half + 3
    data.check()


def test_modes_are_written_read_and_joined(tmp_path: Path) -> None:
    for name, documents in (("a", [[1], [2, 3]]), ("b", [[4], [5]]), ("both", [[1], [2, 3], [4], [5]])):
        with IndexedWriter(tmp_path / name, 100, multimodal=True) as writer:
            for at, ids in enumerate(documents):
                writer.add_document(ids, modes=[at % 2])
    raw = idx_path(tmp_path / "a").read_bytes()
    assert raw[-2:] == bytes([0, 1])
    plain = write(tmp_path / "plain", [[1], [2, 3]])
    assert raw[:-2] == idx_path(plain).read_bytes()  # as in Megatron: the modes stand behind all else
    modes = IndexedDataset(tmp_path / "a").modes
    assert modes is not None and modes.tolist() == [0, 1]
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")
    assert idx_path(tmp_path / "joined").read_bytes() == idx_path(tmp_path / "both").read_bytes()
    with pytest.raises(Refused, match="all with modes or all without"):
        merge([tmp_path / "a", plain], tmp_path / "c")
    with pytest.raises(ValueError, match="all have one"), IndexedWriter(tmp_path / "c", 100) as writer:
        writer.add_document([1], modes=[0])


@pytest.mark.parametrize(
    ("start", "replacement", "said"),
    [
        (0, b"MMAPIDX", "an index starts with"),
        (9, struct.pack("<Q", 2), "its version is 2"),
        (17, b"\x07", "float32, token ids are integers"),
        (17, b"\x63", "its dtype code is 99: unknown"),
        (18, struct.pack("<Q", 0), "it holds no sequences"),
        (18, struct.pack("<Q", 4), "4 sequences and 3 document entries take"),
        (42 + 8, struct.pack("<q", 4), "the index ends at byte 8"),
        (42 + 8, struct.pack("<q", -4), "negative numbers"),
        (42 + 32, struct.pack("<q", 9), "the last document ends at sequence 9"),
    ],
)
def test_damaged_indexes_are_refused(start: int, replacement: bytes, said: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1], [2, 3]])
    raw = bytearray(idx_path(prefix).read_bytes())
    raw[start : start + len(replacement)] = replacement
    idx_path(prefix).write_bytes(raw)
    with pytest.raises(Refused) as refused:
        IndexedDataset(prefix)
    assert said in str(refused.value) and str(prefix) in str(refused.value)


def test_missing_short_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no file"):
        IndexedDataset(tmp_path / "none")
    prefix = write(tmp_path / "a", [[1], [2, 3]])
    bin_path(prefix).write_bytes(b"")
    with pytest.raises(Refused, match="has 0"):
        IndexedDataset(prefix)
    idx_path(prefix).write_bytes(b"")
    with pytest.raises(Refused, match="0 bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("start", "replacement", "said"),
    [
        (34, struct.pack("<i", -5), "has the length -5"),
        (46 + 8, struct.pack("<q", 4), "sequence 1 does not start"),
        (70 + 8, struct.pack("<q", 5), "document 1 ends before"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 100])
def test_training_on_a_damaged_index_is_refused(
    start: int, replacement: bytes, said: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "CHECK_BLOCK", block)
    prefix = write(tmp_path / "a", [[1], [2], [3]])
    raw = bytearray(idx_path(prefix).read_bytes())
    raw[start : start + len(replacement)] = replacement
    idx_path(prefix).write_bytes(raw)
    with pytest.raises(Refused, match=said):
        IndexedDataset(prefix).check()
    with pytest.raises(Refused, match=said):
        build_segments(DataConfig(data_path=(str(prefix),), seq_length=1, split="1"), 1, [2], 0, print)


def test_merge_equals_writing_everything_at_once(tmp_path: Path) -> None:
    first, second = [[1, 2, 3], [4]], [[5], [6, 7]]
    for name, documents in (("a", first), ("b", second), ("both", first + second)):
        write(tmp_path / name, documents)
    write_info(tmp_path / "a", {"tokenizer": "t", "append_eod": True, "documents": 2, "tokens": 4})
    write_info(tmp_path / "b", {"tokenizer": "t", "append_eod": False, "documents": 2, "tokens": 3})
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")
    for path in (bin_path, idx_path):
        assert path(tmp_path / "joined").read_bytes() == path(tmp_path / "both").read_bytes()
    want = {"tokenizer": "t", "append_eod": False, "documents": 4, "tokens": 7}
    assert read_info(tmp_path / "joined") == want


def test_merge_refuses_what_does_not_fit(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[1]], 70000)
    with pytest.raises(Refused, match="one type"):
        merge([a, b], tmp_path / "c")
    with pytest.raises(Refused, match="the output is one of the inputs"):
        merge([a, a], a)
    with pytest.raises(Refused, match="merge of nothing"):
        merge([], tmp_path / "c")
    d = write(tmp_path / "d", [[1]])
    write_info(a, {"tokenizer": "t"})
    write_info(d, {"tokenizer": "u"})
    with pytest.raises(Refused, match="different tokenizers"):
        merge([a, d], tmp_path / "c")


def test_a_broken_note_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "a.info.json").write_text("{")
    assert read_info(tmp_path / "a") is None and read_info(tmp_path / "b") is None
