"""What goes wrong with data (D) and tokenizers (T) in the field: a test for each item, here or where FOUND says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from isotron.core.errors import Refused
from isotron.data.batches import make_batch, microbatches
from isotron.data.blend import normalized
from isotron.data.blend_order import blend_order
from isotron.data.build import build_datasets
from isotron.data.config import DataConfig
from isotron.data.encode import Encoder
from isotron.data.gpt_dataset import GPTDataset
from isotron.data.gpt_index import build_indexes, integers
from isotron.data.index_cache import IndexCache
from isotron.data.indexed import IndexedDataset, idx_path
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.info import write_info
from isotron.data.preprocess import Summary, preprocess
from isotron.data.records import RecordBatch, read_batches
from isotron.data.rows import packed_row
from isotron.data.workers import AHEAD, encode_all
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig
from isotron.tokenizers.null import NullTokenizer

ROOT = Path(__file__).resolve().parents[2]
NULL = NullTokenizer(100)
FOUND = {  # items whose test needs ranks, a long time or another room: file under tests::test
    "D7 memory of a long job": "local/test_data_inputs.py::test_memory_does_not_grow_with_the_input",
    "D3 file, line and byte": "local/test_data_preprocess.py::test_bad_lines_stop_with_their_place_or_are_skipped",
    "D5 offsets of a sparse 4 GB file": "pure/test_data_indexed.py::test_pointers_pass_32_bits",
    "D8 merged is one job": "local/test_data_preprocess.py::test_merge_equals_preprocessing_everything_at_once",
    "D14 no place to write": "pure/test_data_gpt.py::test_the_cache_is_used_checked_and_optional",
    "D15 built offline": "pure/test_data_gpt.py::test_indexes_built_ahead_are_found",
    "D16 a mask that is not honoured": "ranks/test_isolation.py::test_a_change_stays_in_its_document",
    "D17 mask and positions": "ranks/test_isolation.py::test_a_change_stays_in_its_document",
    "D18 borders on middle stages": "ranks/test_isolation.py::test_a_change_stays_in_its_document",
    "D19 odd documents over two ranks": "ranks/test_isolation.py::test_a_change_stays_in_its_document",
    "D19 every gradient": "ranks/test_context.py::test_pairs",
    "D20 twelve tokens": "local/test_data_batches.py::test_twelve_tokens_worked_by_hand",
    "D21 resumed within an epoch": "ranks/test_resume.py::test_resumed_equals_uninterrupted_bitwise",
    "D22 ids of each step": "local/test_data_packed.py::test_a_run_with_all_of_it_goes_on_where_it_was",
    "D23 fewer ranks": "ranks/test_resume.py::test_another_layout_goes_on_with_the_same_numbers",
    "D26 damaged indexes": "pure/test_data_indexed.py::test_damaged_indexes_are_refused",
    "T3 real and padded size": "ranks/test_hub_layouts.py::test_through_a_layout_and_back",
    "T4 odd vocabulary, any TP": "ranks/test_matrix.py::test_pairs",
    "T6 a clash": "local/test_tokenizers_kinds.py::test_special_tokens_that_are_ordinary_or_absent_are_reported",
    "T5 conversion with an odd vocabulary": "ranks/test_hub_layouts.py::test_through_a_layout_and_back",
}


def quiet(_: str) -> None:
    """Log nothing."""


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def run(path: Path, output: Path, **options: object) -> Summary:
    return preprocess([path], output, NULL, **{"workers": 1, "log": quiet, **options})  # type: ignore[arg-type]


def pair(path: Path, lengths: list[int]) -> str:
    with IndexedWriter(path, 60_000) as writer:
        writer.add_documents(np.arange(sum(lengths)) % 60_000, np.asarray(lengths))
    return str(path)


def blend(count: int, *words: str, said: list[str] | None = None) -> object:
    log = quiet if said is None else said.append
    config = DataConfig(data_path=words, seq_length=4, split="1")
    return build_datasets(config, 1, (count, 0), log)[0]


def test_every_item_has_a_test() -> None:
    names = [name for name in globals() if name.startswith("test_")]
    items = {
        f"{letter.upper()}{int(number)}" for name in names for letter, number in re.findall(r"_([dt])(\d\d)", name)
    }
    items |= {key.split()[0] for key in FOUND}
    assert items == {f"D{i}" for i in range(1, 27)} | {f"T{i}" for i in range(1, 7)}
    for place in FOUND.values():
        file, name = place.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), place


def test_d01_empty_first_record_with_ends(tmp_path: Path) -> None:
    summary = run(jsonl(tmp_path / "a.jsonl", ["", "1 2", ""]), tmp_path / "o", append_eod=True)
    assert (summary.documents, summary.tokens, summary.empty) == (1, 3, 2) and "2 empty texts" in str(summary)


def test_d02_nothing_usable_or_an_unknown_ending_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n \n\n")
    (tmp_path / "a.data").write_text('{"text": "1"}\n')
    for name, said in (("a.jsonl", "no document"), ("a.data", "inputs end in .jsonl")):
        with pytest.raises(Refused, match=said) as refused:
            run(tmp_path / name, tmp_path / "o")
        assert refused.value.exit_code != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.data", "a.jsonl"]


def test_d04_many_epochs_stay_ordered_and_positive() -> None:
    made = build_indexes(np.array([2**30, 3, 2**31 - 1], dtype=np.int32), range(3), 40, 2**29, seed=3)
    place, offset = made.sample[:, 0].astype(np.int64), made.sample[:, 1].astype(np.int64)
    sizes = np.array([2**30, 3, 2**31 - 1])[made.document]
    starts = np.concatenate(([0], np.cumsum(sizes)))[place] + offset
    assert int(sizes.sum()) > 2**34 and starts.tolist() == [i * 2**29 for i in range(len(starts))]
    assert made.sample.min() >= 0 and np.all(np.diff(place) >= 0)
    assert integers(2**31 - 1) is np.int32 and integers(2**31) is np.int64


def test_d05_overflows_of_numpy_are_errors(tmp_path: Path) -> None:
    class Overflowing(NullTokenizer):
        """Adds up what does not fit."""

        def encode_flat(self, texts: object) -> object:  # type: ignore[override]
            return np.int32(2**31 - 1) + np.int32(1)

    with pytest.raises(FloatingPointError):
        preprocess([jsonl(tmp_path / "a.jsonl", ["1"])], tmp_path / "o", Overflowing(100), workers=1, log=quiet)


def test_d06_documents_beyond_32_bits() -> None:
    from isotron.data.gpt_index import Plan, _document_index

    many = range(2**31 - 1, 2**31 + 3)
    made = _document_index(many, Plan(3, 4, 4, True), np.random.RandomState(1))
    assert made.dtype == np.int64 and sorted(made[8:].tolist()) == list(many) and made.min() > 0


def test_d07_a_slow_writer_holds_the_reader_back(tmp_path: Path) -> None:
    batches = list(read_batches([jsonl(tmp_path / "a.jsonl", ["1 2 3"] * 400)], max_records=4))
    drawn = 0

    def counted() -> Iterator[RecordBatch]:
        nonlocal drawn
        for batch in batches:
            drawn += 1
            yield batch

    for done, _ in enumerate(encode_all(Encoder(NULL, ("text",), False), counted(), 2), start=1):
        assert drawn <= done + 2 * AHEAD
    assert done == drawn == 100


def test_d09_ids_at_the_border_of_16_bits(tmp_path: Path) -> None:
    ids = [65535, 65536, 70000]
    with IndexedWriter(tmp_path / "a", 70001) as writer:
        writer.add_document(ids)
    assert IndexedDataset(tmp_path / "a")[0].tolist() == ids
    for forced, bad in ((np.uint16, 65536), (None, 70000)):
        with pytest.raises(Refused, match=str(bad)), IndexedWriter(tmp_path / "b", 70000, dtype=forced) as writer:
            writer.add_document([bad])
    added = build_tokenizer(TokenizerConfig(tokenizer_model=str(ROOT / "assets/demo_tokenizer"), vocab_extra_ids=70000))
    assert added.vocab_size > 70000  # added tokens count: so the ids of such data are stored in 32 bits


def test_d10_extreme_weights(tmp_path: Path) -> None:
    for weights in ([0.001, 0.999], [0.999, 0.001], [1e-7, 1.0]):
        shares = normalized(weights)
        which, _ = blend_order(shares, 3000)
        drawn = np.cumsum(which[:, None] == np.arange(2), axis=0)
        assert np.all(np.abs(drawn - np.arange(1, 3001)[:, None] * shares) <= 1)
    a, b = pair(tmp_path / "a", [9]), pair(tmp_path / "b", [9] * 9)
    data = blend(500, "0.999", a, "0.001", b)  # the small source is gone through 250 times
    assert all(len(data[i]) == 5 for i in range(500))  # type: ignore[index]


def test_d11_the_blend_is_printed(tmp_path: Path) -> None:
    a, b, said = pair(tmp_path / "a", [41]), pair(tmp_path / "b", [81]), []  # type: ignore[var-annotated]
    blend(30, "1", a, "2", b, said=said)  # of 10 and 20 samples an epoch
    assert "10 samples, 40 tokens, 0.976 epochs of" in said[1] and "20 samples, 80 tokens, 0.988 epochs" in said[2]


def test_d12_three_hundred_sources_of_one_document(tmp_path: Path) -> None:
    first = pair(tmp_path / "d0", [5])
    prefixes = [first, *(str(tmp_path / f"d{k}") for k in range(1, 300))]
    for prefix in prefixes[1:]:
        for end in (".bin", ".idx"):
            Path(prefix + end).symlink_to(first + end)
    data = blend(600, *(word for prefix in prefixes for word in ("1", prefix)))
    assert np.bincount(data.which, minlength=300).tolist() == [2] * 300  # type: ignore[attr-defined]
    assert len(data[599]) == 5  # type: ignore[index]


def test_d13_head_room_does_not_shift_the_shares(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a", [9] * 50), pair(tmp_path / "b", [9] * 50)
    data = blend(1000, "0.3", a, "0.7", b)
    assert np.bincount(data.which).tolist() == [300, 700]  # type: ignore[attr-defined]


def test_d14_any_number_of_ranks_build_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotron.data.index_cache.KEEP", 0)
    (tmp_path / "file").write_text("")
    data = IndexedDataset(pair(tmp_path / "a", [13] * 40))

    def build(directory: str) -> list[int]:
        made = GPTDataset(data, range(40), 100, 4, 1, IndexCache(tmp_path / directory, quiet))
        return made.indexes.shuffle.tolist()  # type: ignore[no-any-return]

    places = ["shared", "shared", "other", "shared", "file/not a directory", "other", "shared", "file/at all"]
    with ThreadPoolExecutor(8) as pool:
        assert len({tuple(found) for found in pool.map(build, places)}) == 1
    assert not list(tmp_path.glob("*/*.tmp-*")) and len(list((tmp_path / "shared").iterdir())) == 4


def test_d15_the_log_says_what_is_built_and_for_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotron.data.index_cache.KEEP", 0)
    prefix, said = pair(tmp_path / "a", [13] * 40), []  # type: ignore[var-annotated]
    blend(100, prefix, said=said)
    assert said[0].startswith(f"building the index of {prefix}: 40 documents, 1 epoch") and "about 0 s" in said[0]


def test_d21_d22_d23_the_place_is_one_integer() -> None:
    class Numbered:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[type-arg]
            return np.arange(index, index + 5)

    def taken(consumed: int, dp: int) -> list[int]:
        ranks = [microbatches(Numbered(), consumed, 8, 2, d, dp, DataConfig(seq_length=4), None) for d in range(dp)]
        return [i for step in zip(*ranks, strict=True) for batch in step for i in batch.sample_ids.tolist()]

    first = taken(0, 4)
    assert first == list(range(8))
    for dp in (4, 2, 1):
        assert taken(8, dp) == list(range(8, 16))


def test_d24_every_rank_has_as_many_microbatches() -> None:
    data = [np.arange(5)] * 12
    with pytest.raises(Refused, match="--global-batch-size 10 --micro-batch-size 2 --dp 3\n.*= 6\n.*12"):
        microbatches(data, 0, 10, 2, 0, 3, DataConfig(seq_length=4), None)  # type: ignore[arg-type]
    counts = {len(microbatches(data, 0, 12, 2, d, 3, DataConfig(seq_length=4), None)) for d in range(3)}  # type: ignore[arg-type]
    assert counts == {2}


def test_d25_all_ranks_run_out_together() -> None:
    data = [np.arange(5)] * 9
    for rank in range(2):
        microbatches(data, 0, 4, 2, rank, 2, DataConfig(seq_length=4), None)  # type: ignore[arg-type]
        with pytest.raises(Refused, match="samples 8..11\n.*built for 9 samples") as refused:
            microbatches(data, 8, 4, 2, rank, 2, DataConfig(seq_length=4), None)  # type: ignore[arg-type]
        assert refused.value.exit_code == 1


def test_d26_less_than_one_sequence(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [20])
    with pytest.raises(Refused, match="hold 20 tokens; one sample takes 33"):
        build_datasets(DataConfig(data_path=(prefix,), seq_length=32, split="1"), 1, (5, 0), quiet)
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[:-1])
    with pytest.raises(Refused, match="take 62 bytes, it has 61"):
        IndexedDataset(prefix)


def test_t01_padding_is_masked_by_place() -> None:
    row = packed_row([np.array([5, 6, 0, 7])], [np.ones(4, dtype=np.float32)], 6)
    assert row.labels.tolist() == [6, 0, 7, 0, 0, 0] and row.loss.tolist() == [1, 1, 1, 0, 0, 0]
    batch = make_batch([np.array([5, 6, 0, 7, 0])], range(1), DataConfig(seq_length=4), 0)  # type: ignore[arg-type]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1]]


def test_t02_a_saved_tokenizer_is_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = build_tokenizer(TokenizerConfig(tokenizer_model=str(ROOT / "assets" / "demo_tokenizer"), vocab_extra_ids=3))
    made.save(tmp_path)
    again = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))
    assert again.describe() == made.describe() and {"eod", "eos", "bos", "pad", "extra_ids"} <= made.describe().keys()
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    for text in ("And it came to pass", " naïve — 漢字\n\n"):
        assert theirs.encode(text, add_special_tokens=False) == again.encode(text) == made.encode(text)


def test_data_of_another_tokenizer_is_said_before_it_is_read(tmp_path: Path) -> None:
    """By the hashes in its note, also where sizes and special ids are equal; the same files say nothing."""
    prefix, said = str(tmp_path / "a"), list[str]()
    with IndexedWriter(prefix, 5000) as writer:
        writer.add_document(list(range(200)))
    made = build_tokenizer(TokenizerConfig(tokenizer_model=str(ROOT / "assets" / "demo_tokenizer")))
    options = DataConfig(data_path=(prefix,), seq_length=8, split="1,0,0")
    for descriptor, lines in ((made.describe(), 0), (made.describe() | {"sha256": {"own.json": "0"}}, 1)):
        write_info(prefix, {"tokenizer": descriptor})
        said.clear()
        build_datasets(options, 1, (2, 0), said.append, tokenizer=made)
        assert sum(f"data {prefix} was preprocessed with another tokenizer" in line for line in said) == lines
