"""Packed rows, conversations with loss on answers only, fill-in-the-middle, growing batches and skipped samples."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isotron.commands.finetune import completed
from isotron.core.errors import Refused
from isotron.data.batches import make_batch
from isotron.data.build import build_datasets
from isotron.data.chat import is_chat, preprocess_chat
from isotron.data.config import DataConfig
from isotron.data.fim import FimDataset
from isotron.data.indexed import IndexedDataset
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.packed import PackedDataset, best_fit
from isotron.data.rows import Row, packed_row
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.chat import read_template
from isotron.tokenizers.config import TokenizerConfig
from isotron.train.config import TrainConfig
from isotron.train.feed import batch_size, end_of, steps

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo_tokenizer"


def quiet(_: str) -> None:
    """Log nothing."""


def pair(path: Path, lengths: list[int]) -> str:
    with IndexedWriter(path, 60_000) as writer:
        writer.add_documents(np.arange(sum(lengths)), np.asarray(lengths))
    return str(path)


def test_a_packed_row_of_twelve_slots() -> None:
    """Documents 5 6 0 7 (0 ends and pads) and 8 9 0: seven ids are slots with labels, the rest is padding."""
    ids = [np.array([5, 6, 0, 7]), np.array([8, 9, 0, 4, 0])]
    row = packed_row(ids, [np.ones(4, dtype=np.float32), np.array([0, 0, 1, 1, 1], dtype=np.float32)], 12)
    assert row.tokens.tolist() == [5, 6, 0, 8, 9, 0, 4, 0, 0, 0, 0, 0]
    assert row.labels.tolist() == [6, 0, 7, 9, 0, 4, 0, 0, 0, 0, 0, 0]
    # the label 0 that ends a document keeps its loss, the same id as padding has none; 9 is no answer
    assert row.loss.tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert row.documents.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_wastes_little_and_loses_nothing(seed: int) -> None:
    random = np.random.RandomState(seed)
    sizes = random.randint(0, 33, 200).tolist()
    bins = best_fit(sizes, 32)
    assert Counter(i for held in bins for i in held) == Counter(i for i, size in enumerate(sizes) if size > 0)
    totals = [sum(sizes[i] for i in held) for held in bins]
    assert max(totals) <= 32 and len(bins) <= 11 / 9 * -(-sum(sizes) // 32) + 1  # the bound of best fit decreasing
    assert best_fit(sizes, 32) == bins and best_fit([0, 0], 4) == []


def test_epochs_of_packed_rows(tmp_path: Path) -> None:
    data, said = IndexedDataset(pair(tmp_path / "a", [5, 4, 9, 1, 3, 3, 30])), []  # type: tuple[IndexedDataset, list[str]]
    packed = PackedDataset(data, range(7), 8, 8, 3, log=said.append)
    rows = len(packed.bins)
    assert "1 of 7 documents" in said[0] and len(packed) == 8 and rows == 4
    first = [packed[i] for i in range(rows)]
    seen = np.concatenate([row.tokens[row.loss > 0] for row in first])
    labels = np.concatenate([row.labels[row.loss > 0] for row in first])
    assert np.array_equal(labels, seen + 1) and len(seen) == 4 + 3 + 8 + 2 + 2 + 8
    again = PackedDataset(data, range(7), 8, 8, 3, log=quiet)
    assert all(np.array_equal(again[i].tokens, packed[i].tokens) for i in (7, 0, 5))
    assert {tuple(packed[i].tokens) for i in range(rows, 2 * rows)} == {tuple(row.tokens) for row in first}
    with pytest.raises(IndexError):
        packed[8]
    with pytest.raises(Refused, match="none of them has two tokens"):
        PackedDataset(data, range(3, 4), None, 8, 3, log=quiet)
    with pytest.raises(Refused, match="vocabulary of 10"):
        [PackedDataset(data, range(7), 8, 8, 3, 10, quiet)[i] for i in range(4)]


def test_packed_rows_become_batches(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [5, 4, 9, 2, 3, 3] * 4)
    config = DataConfig(data_path=("1", prefix, "2", prefix), seq_length=8, split="1", pack_documents=True)
    data, _ = build_datasets(config, 1, (9, 0), quiet)
    assert data is not None
    batch = make_batch(data, range(2, 4), config, None)
    assert batch.shape == (2, 8) and batch.doc_ids is not None and batch.loss_mask.dtype == torch.float32
    rows = [data[i] for i in (2, 3)]
    assert isinstance(rows[0], Row) and batch.labels.tolist() == [row.labels.tolist() for row in rows]
    assert batch.positions.tolist() == [row.positions.tolist() for row in rows]


TALKS = [
    [{"role": "user", "content": "Who art thou?"}, {"role": "assistant", "content": "A king."}],
    [
        {"role": "user", "content": "And he?"},
        {"role": "assistant", "content": "None."},
        {"role": "user", "content": "?"},
    ],
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return folder


def test_conversations_carry_loss_on_answers(tmp_path: Path, chat_tokenizer: Path) -> None:
    tokenizer, template = (
        build_tokenizer(TokenizerConfig(tokenizer_model=str(chat_tokenizer))),
        read_template(chat_tokenizer),
    )
    assert template is not None
    path, said = tmp_path / "a.jsonl", []  # type: tuple[Path, list[str]]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    assert is_chat(path) and preprocess_chat([path], tmp_path / "chat", tokenizer, template, said.append) == 2
    assert "2 conversations" in said[0]
    config = DataConfig(data_path=(str(tmp_path / "chat"),), seq_length=64, split="1", pack_documents=True)
    data, _ = build_datasets(config, 1, (1, 0), quiet, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    assert data is not None
    row = data[0]
    assert sorted(tokenizer.decode(row.labels[row.loss > 0].tolist()).split("<|endoftext|>")) == [
        "",
        "A king.",
        "None.",
    ]
    with pytest.raises(Refused, match="only rows of whole conversations keep to"):
        build_datasets(DataConfig(data_path=(str(tmp_path / "chat"),), seq_length=8, split="1"), 1, (1, 0), quiet)
    IndexedDataset(str(tmp_path / "chat") + ".answers").check()
    pair(tmp_path / "chat", [3])
    with pytest.raises(Refused, match="has other documents"):
        build_datasets(config, 1, (1, 0), quiet)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"text": "a"}', "no list 'messages'"),
        ('{"messages": []}', "no list 'messages'"),
        ('{"messages": ["a"]}', "a message is"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no answer"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}', "does not take a conversation"),
        ("{", "bad JSON"),
    ],
)
def test_what_is_no_conversation_is_refused(record: str, said: str, tmp_path: Path, chat_tokenizer: Path) -> None:
    tokenizer, template = (
        build_tokenizer(TokenizerConfig(tokenizer_model=str(chat_tokenizer))),
        read_template(chat_tokenizer),
    )
    assert template is not None
    (tmp_path / "a.jsonl").write_text(record + "\n")
    with pytest.raises(Refused) as refused:
        preprocess_chat([tmp_path / "a.jsonl"], tmp_path / "chat", tokenizer, template, quiet)
    assert said in str(refused.value) and not (tmp_path / "chat.idx").exists()


def test_fill_in_the_middle_rearranges_documents_by_number(tmp_path: Path) -> None:
    eod, tokens = 999, (1000, 1001, 1002)
    row = np.array([*range(1, 9), eod, *range(11, 19), eod, *range(21, 28)])

    class Same:
        def __len__(self) -> int:
            return 500

        def __getitem__(self, index: int) -> np.ndarray:
            return row

    made = FimDataset(Same(), tokens, eod, 1.0, 0.5, seed=7)
    kinds = Counter()
    for i in range(500):
        found = made[i]
        assert len(found) == len(row) and np.array_equal(found, made[i])
        head = found[: int(np.flatnonzero(found == eod)[0])].tolist()
        assert sorted(t for t in head if t < 999) == list(range(1, 9)) and set(tokens) <= set(head)
        p, m, s = (head.index(t) for t in tokens)
        assert p == 0 and s < m
        kinds["spm" if s == 1 and m + 1 < len(head) and head[m + 1] == 1 else "psm"] += 1
        if s > 1 or head[m + 1 :][:1] != [1]:
            assert head[1:s] + head[m + 1 :] + head[s + 1 : m] == list(range(1, 9))
    assert 150 < kinds["spm"] < 350 and made[0].tolist() != made[1].tolist()
    assert np.array_equal(FimDataset(Same(), tokens, eod, 0.0, 0.5, 7)[3], row)
    prefix = pair(tmp_path / "a", [9] * 9)
    config = DataConfig(data_path=(prefix,), seq_length=4, split="1", fim_rate=1.0)
    with pytest.raises(Refused, match="three different ids"):
        build_datasets(config, 1, (3, 0), quiet)
    with pytest.raises(Refused, match="--fim-cut characters\nbut: .*there is no tokenizer"):
        build_datasets(replace(config, fim_token_ids=(1, 2, 3)), 1, (3, 0), quiet)


def test_fill_in_the_middle_cuts_texts_anywhere() -> None:
    """Between characters, encoded anew: the parts are the text; what is no text is cut between its ids."""
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(DEMO)))
    text = "And it came to pass — in those days — that nobody counted characters."
    ids = tokenizer.encode(text)
    broken = [*tokenizer.encode("漢")[:1], *ids]  # a row that begins within a character
    assert tokenizer.encode(tokenizer.decode(broken)) != broken
    special = (5000, 5001, 5002)

    def parts(row: list[int], number: int) -> tuple[list[int], list[int], list[int]]:
        rows = [np.array([*row, *[tokenizer.eod] * 40])] * (number + 1)
        made = FimDataset(rows, special, tokenizer.eod, 1.0, 0.0, 7, tokenizer)[number].tolist()  # type: ignore[arg-type]
        made = made[: made.index(tokenizer.eod)]
        p, m, s = (made.index(t) for t in special)
        return made[p + 1 : s], made[m + 1 :], made[s + 1 : m]

    found = [parts(ids, number) for number in range(60)]
    texts = [[tokenizer.decode(part) for part in three] for three in found]
    assert all("".join(three) == text for three in texts)
    assert all([tokenizer.encode(t) for t in ts] == list(three) for ts, three in zip(texts, found, strict=True))
    assert sum(sum(three, []) != ids for three in found) > 30  # most cuts lie within a token
    assert all(sum(parts(broken, number), []) == broken for number in range(20))


def test_batches_grow_as_in_megatron() -> None:
    train = TrainConfig(global_batch_size=32, rampup_batch_size=(8, 8, 96), train_iters=10)
    taken = list(steps(train, 0, 12))
    assert [size for _, size in taken] == [8, 8, 8, 8, 16, 16, 24, 24, 32, 32, 32, 32]
    assert all(a + n == b for (a, n), (b, _) in zip(taken, taken[1:], strict=False))
    for cut in range(12):  # a resumed run goes on with the same steps
        assert list(steps(train, taken[cut][0], 12 - cut)) == taken[cut:]
    assert end_of(train, 0, 12) == sum(taken[-1]) and end_of(train, 7, 0) == 7
    assert batch_size(TrainConfig(global_batch_size=4), 99) == 4
    assert batch_size(TrainConfig(global_batch_size=4, rampup_batch_size=(4, 2, 10)), 0) == 4


def test_skipped_samples_are_taken_by_no_step() -> None:
    train = TrainConfig(global_batch_size=4, skip_samples=("10-12", "24-30"))
    taken = list(steps(train, 0, 6))
    assert taken == [(0, 4), (4, 4), (13, 4), (17, 4), (31, 4), (35, 4)]
    assert end_of(train, 0, 6) == 39 and list(steps(train, 17, 2)) == taken[3:5]
    for bad in ("5", "9-3", "a-b", "-4"):
        with pytest.raises(Refused, match="FIRST-LAST"):
            list(steps(TrainConfig(global_batch_size=4, skip_samples=(bad,)), 0, 1))


def test_finetuning_on_a_directory_of_conversations(
    tmp_path: Path, chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS * 4))
    table = {"tokenizer_model": str(chat_tokenizer)}
    from isotron.commands import finetune
    from isotron.config.resume import Found

    said: list[str] = []
    prefix = finetune._tokenized(folder, [folder / "a.jsonl"], Found(config={"tokenizer": table}), said.append)
    assert finetune._are_conversations([prefix]) and IndexedDataset(prefix).documents == 8
    (folder / "b.jsonl").write_text('{"text": "plain"}\n')
    with pytest.raises(Refused, match="a.jsonl holds conversations, b.jsonl texts"):
        finetune._tokenized(folder, [folder / "a.jsonl", folder / "b.jsonl"], Found(config={"tokenizer": table}), quiet)
    with pytest.raises(Refused, match="no chat template"):
        finetune._tokenized(
            folder, [folder / "a.jsonl"], Found(config={"tokenizer": {"tokenizer_model": str(DEMO)}}), quiet
        )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (folder / "b.jsonl").unlink()
    found = Found(config={"tokenizer": table})
    assert finetune._tokenized(folder, [folder / "a.jsonl"], found, quiet) == prefix  # made before: ranks may read it
    os.utime(folder / "a.jsonl", (1, 1))
    with pytest.raises(Refused, match="under a launcher\\n.*\\n.*--print-config, once"):
        finetune._tokenized(folder, [folder / "a.jsonl"], found, quiet)
    with pytest.raises(Refused, match="--load not given"):
        completed(["--data-path", str(folder)], quiet)


def test_a_run_with_all_of_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Packed rows, growing batches, a skipped stretch and two validation sets; cut in two, the same lines."""
    from isotron import cli

    a, b = pair(tmp_path / "a", [9, 5, 3, 12, 7] * 30), pair(tmp_path / "b", [6] * 40)
    model = ["--family", "llama", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"]
    model += [
        "--tokenizer-type",
        "NullTokenizer",
        "--seq-length",
        "16",
        "--vocab-size",
        "1100",
        "--dtype",
        "float64",
        "--device",
        "cpu",
        "--no-tensorboard",
    ]
    data = ["--data-path", a, "--valid-data-path", a, b, "--multiple-validation-sets", "--pack-documents"]
    run = ["--global-batch-size", "6", "--rampup-batch-size", "2,2,8", "--skip-samples", "11-13", "--eval-iters", "1"]

    def lines(name: str) -> list[dict]:
        found = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [line for line in found if "loss" in line or "eval" in line]

    words = ["train", *model, *data, *run, "--micro-batch-size", "2"]
    assert cli.main([*words, "--train-iters", "5", "--save", str(tmp_path / "whole")]) == 0
    whole = lines("whole")
    assert [line["sample_ids"] for line in whole if "loss" in line] == [[0, 1], [2, 3], [4, 7], [14, 19], [20, 25]]
    assert {line["eval"] for line in whole if "eval" in line} == {"valid/a", "valid/b"}
    first = [*words, "--train-iters", "5", "--lr-decay-iters", "5", "--save", str(tmp_path / "cut")]
    assert cli.main([*first, "--save-interval", "3"]) == 0
    again = [*first, "--load", str(tmp_path / "cut" / "step_00000003"), "--save", str(tmp_path / "rest")]
    assert cli.main(again) == 0
    assert [line["loss"] for line in lines("rest") if "loss" in line] == [
        line["loss"] for line in whole if "loss" in line
    ][3:]
