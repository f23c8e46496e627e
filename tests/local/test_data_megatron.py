"""Against the published megatron-core package: the same files and the same indexes. Skipped where it is absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotron.data.batches import make_batch
from isotron.data.build import build_datasets
from isotron.data.config import DataConfig
from isotron.data.gpt_index import build_indexes
from isotron.data.indexed import IndexedDataset, bin_path, idx_path
from isotron.data.indexed_writer import IndexedWriter

pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core is not installed: nothing to compare")


def test_files_are_equal_byte_for_byte(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [[1, 2, 3], [4], [5, 99]]
    builder = IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=np.uint16)
    for ids in documents:
        builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(str(tmp_path / "t.idx"))
    with IndexedWriter(tmp_path / "a", 100) as writer:
        for ids in documents:
            writer.add_document(ids)
    for path in (bin_path, idx_path):
        assert path(tmp_path / "a").read_bytes() == path(tmp_path / "t").read_bytes()


LENGTHS = {
    "few": [5, 3, 7, 4, 9, 2],
    "empty": [0, 5, 0, 3, 7, 0, 4, 9, 2, 0],
    "one": [400],
    "many": np.random.RandomState(0).randint(1, 80, 300).tolist(),
}


def pair(path: Path, lengths: list[int]) -> str:
    """A pair whose ids count upwards over the documents."""
    with IndexedWriter(path, 60_000) as writer:
        writer.add_documents(np.arange(sum(lengths)), np.asarray(lengths))
    return str(path)


class Stub:
    """What Megatron asks of a tokenizer."""

    vocab_size, eod, pad, unique_identifiers = 60_000, 59_999, 59_998, {"class": "Stub"}
    bos = eos = None


def megatron(seq_length: int, seed: int, sizes: list[int | None], **paths: object) -> list[Any]:
    """Megatron's own datasets for training, validation and test."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        tokenizer=Stub(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **paths,
    )
    return list(BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build())


def same_samples(ours: Any, theirs: Any, count: int) -> None:
    for i in range(count):
        assert ours[i][:-1].tolist() == theirs[i]["tokens"].tolist(), i
        assert ours[i][1:].tolist() == theirs[i]["labels"].tolist(), i


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("seq_length", [2, 5, 16])
@pytest.mark.parametrize("seed", [1, 1234])
def test_indexes_are_equal(name: str, seq_length: int, seed: int, tmp_path: Path) -> None:
    prefix = pair(tmp_path / name, LENGTHS[name])
    epoch = (sum(LENGTHS[name]) - 1) // seq_length
    if epoch == 0:
        pytest.skip("less than one sample")
    for count in {1, epoch, epoch + 1, 2 * epoch - 1, int(1.7 * epoch), int(2.85 * epoch), 5 * epoch + 1}:
        theirs = megatron(seq_length, seed, [count, 0, 0], blend=([prefix], None), split="1,0,0")[0]
        lengths = IndexedDataset(prefix).lengths
        ours = build_indexes(lengths, range(len(lengths)), count, seq_length, seed)
        for key in ("document", "sample", "shuffle"):
            mine, other = getattr(ours, key), getattr(theirs, f"{key}_index")
            assert mine.dtype == other.dtype and mine.tolist() == other.tolist(), (count, key)


@pytest.mark.parametrize("split", ["969,30,1", "80,20", "0.5,0.25,0.25", "99,1,0"])
def test_splits_are_equal(split: str, tmp_path: Path) -> None:
    # enough documents for a test part: Megatron counts epochs forever over an empty one
    prefix = pair(tmp_path / "many", LENGTHS["many"] * 4)
    theirs = megatron(16, 3, [700, 20, 0], blend=([prefix], None), split=split)
    config = DataConfig(data_path=(prefix,), split=split, seq_length=16)
    ours = build_datasets(config, 3, (700, 20), lambda _: None)
    for mine, other, count in zip(ours, theirs, (700, 20), strict=False):
        assert mine is not None and len(mine) == len(other)
        same_samples(mine, other, count)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 7.0], [0.001, 0.999, 0.5], [3.0, 3.0, 3.0]])
@pytest.mark.parametrize("count", [7, 150, 1000])
def test_blends_are_equal(weights: list[float] | None, count: int, tmp_path: Path) -> None:
    random = np.random.RandomState(5)
    prefixes = [pair(tmp_path / f"d{k}", random.randint(1, 90, 40 * (k + 1)).tolist()) for k in range(3)]
    if weights is None:
        count = min(count, 300)  # one epoch of all three: Megatron has no more
    words = [w for k in range(3) for w in ([str(weights[k])] if weights else []) + [prefixes[k]]]
    config = DataConfig(data_path=tuple(words), split="90,10,0", seq_length=16)
    train, valid = build_datasets(config, 9, (count, 10), lambda _: None)
    theirs = megatron(16, 9, [count, 10, 0], blend=(prefixes, weights), split="90,10,0")
    assert train is not None and valid is not None
    assert len(train) == len(theirs[0]) and len(valid) == len(theirs[1])
    same_samples(train, theirs[0], count)
    same_samples(valid, theirs[1], 10)


def test_a_weight_before_a_single_prefix_and_a_path_for_each_part(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a", LENGTHS["many"]), pair(tmp_path / "b", LENGTHS["many"][::-1])
    config = DataConfig(data_path=("2.0", a), split="1,0,0", seq_length=16)
    train, _ = build_datasets(config, 9, (900, 0), lambda _: None)
    same_samples(train, megatron(16, 9, [900, 0, 0], blend=([a], [2.0]), split="1,0,0")[0], 900)
    config = DataConfig(data_path=(a,), valid_data_path=(b,), seq_length=16)
    ours = build_datasets(config, 9, (900, 50), lambda _: None)
    theirs = megatron(16, 9, [900, 50, 0], blend_per_split=[([a], None), ([b], None), None])
    for mine, other, count in zip(ours, theirs, (900, 50), strict=False):
        same_samples(mine, other, count)


@pytest.mark.parametrize("options", [(True, False, False), (False, True, False), (True, True, True)])
def test_masks_and_positions_are_equal(options: tuple[bool, bool, bool]) -> None:
    import torch
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as reference

    random = np.random.RandomState(1)
    rows = [np.where(random.rand(24) < 0.2, 99, random.randint(0, 90, 24)) for _ in range(8)]
    loss, positions, mask = options
    config = DataConfig(seq_length=23, eod_mask_loss=loss, reset_position_ids=positions, reset_attention_mask=mask)
    batch = make_batch(rows, range(8), config, 99)  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        tokens = torch.tensor(row[:-1])
        hidden, loss_mask, position_ids = reference(tokens, 99, positions, mask, loss, True)
        assert torch.equal(batch.loss_mask[i], loss_mask) and torch.equal(batch.positions[i], position_ids)
        if mask:
            assert batch.doc_ids is not None
            same = batch.doc_ids[i][:, None] == batch.doc_ids[i][None, :]
            assert torch.equal(hidden[0], ~(same & torch.ones(23, 23, dtype=torch.bool).tril()))


@pytest.mark.parametrize("number", range(10))
def test_random_configurations_are_equal(number: int, tmp_path: Path) -> None:
    """Sources, lengths, weights, split, sequence length, seed and counts drawn at random: the same samples in order."""
    random = np.random.RandomState(100 + number)
    sources = int(random.randint(1, 6))
    prefixes = [
        pair(tmp_path / f"d{k}", random.randint(1, 60, int(random.randint(60, 200))).tolist()) for k in range(sources)
    ]
    weights = None if random.rand() < 0.3 else [float(w) for w in random.rand(sources) + 0.05]
    split = f"{random.randint(70, 95)},{random.randint(5, 20)},0"
    seq_length, seed = int(random.randint(4, 40)), int(random.randint(1, 10_000))
    config = DataConfig(
        data_path=tuple(w for k in range(sources) for w in ([str(weights[k])] if weights else []) + [prefixes[k]]),
        split=split,
        seq_length=seq_length,
    )
    epoch = sum(int(IndexedDataset(p).tokens) for p in prefixes) * 7 // (10 * seq_length)
    # several sources without weights have one epoch in Megatron, and no more
    count = int(random.randint(1, epoch if weights is None and sources > 1 else 3 * epoch))
    train, valid = build_datasets(config, seed, (count, 5), lambda _: None)
    theirs = megatron(seq_length, seed, [count, 5, 0], blend=(prefixes, weights), split=split)
    assert train is not None and valid is not None
    same_samples(train, theirs[0], count)
    same_samples(valid, theirs[1], 5)
