"""Order of samples: hand-worked indexes, a token-by-token oracle, splits, blends, the cache, and every refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isotron.core.errors import Refused
from isotron.data import blend_order as orders
from isotron.data.blend import find_prefixes, normalized
from isotron.data.blend_order import blend_order
from isotron.data.build import build_datasets, build_segments, count_sources
from isotron.data.config import DataConfig
from isotron.data.gpt_dataset import Dataset, GPTDataset, split_documents
from isotron.data.gpt_index import Plan, build_indexes, plan_epochs
from isotron.data.index_cache import Expected, IndexCache
from isotron.data.indexed import IndexedDataset
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.info import write_info


def quiet(_: str) -> None:
    """Log nothing."""


def pair(path: Path, lengths: list[int]) -> str:
    """A pair whose ids count upwards over the documents, so that every token is known by its id."""
    with IndexedWriter(path, 60_000) as writer:
        writer.add_documents(np.arange(sum(lengths)), np.asarray(lengths))
    return str(path)


def config(*paths: str, **options: object) -> DataConfig:
    return DataConfig(data_path=paths, **{"seq_length": 4, "split": "1,0,0", **options})  # type: ignore[arg-type]


def train(*paths: str, count: int = 10, seed: int = 1, **options: object) -> Dataset:
    dataset, _ = build_datasets(config(*paths, **options), seed, (count, 0), quiet)
    assert dataset is not None
    return dataset


def items(dataset: Dataset, count: int | None = None) -> list[list[int]]:
    return [dataset[i].tolist() for i in range(len(dataset) if count is None else count)]


def test_hand_worked_indexes() -> None:
    # lengths 3, 5, 4; 12 tokens an epoch; 4 samples of 4 take 17 tokens: two epochs, (24 - 1) // 4 = 5 samples.
    # documents in the order 2 1 2 0 1 0 end at 4 9 13 16 21 24; samples start at 0 4 8 12 16 20
    made = build_indexes(np.array([3, 5, 4], dtype=np.int32), range(3), 4, 4, seed=1234)
    assert made.document.tolist() == [2, 1, 2, 0, 1, 0] and made.document.dtype == np.int32
    assert made.sample.tolist() == [[0, 0], [1, 0], [1, 4], [2, 3], [4, 0], [4, 4]]
    assert made.shuffle.tolist() == [2, 0, 4, 3, 1] and made.shuffle.dtype == np.uint32
    one = build_indexes(np.array([3, 5, 4], dtype=np.int32), range(3), 2, 4, seed=1234)
    assert (one.document.tolist(), one.sample.tolist()) == ([0, 1, 2], [[0, 0], [1, 1], [2, 0]])


def test_the_last_epoch_is_apart_below_four_fifths() -> None:
    # 41 tokens an epoch and 8 a sample: 5 samples an epoch, so apart when fewer than 4 of the last epoch are used
    assert plan_epochs(41, 5, 8) == Plan(1, 5, 5, False)
    assert plan_epochs(41, 9, 8) == Plan(2, 10, 5, False)
    assert plan_epochs(41, 11, 8) == Plan(3, 15, 10, True)
    made = build_indexes(np.array([20, 21], dtype=np.int32), range(2), 11, 8, seed=5)
    assert sorted(made.document[:4].tolist()) == [0, 0, 1, 1] and sorted(made.document[4:].tolist()) == [0, 1]
    assert sorted(made.shuffle[:10].tolist()) == list(range(10))
    assert plan_epochs(41, None, 8) == Plan(1, 5, 5, False)


@pytest.mark.parametrize("seed", range(6))
def test_samples_equal_walking_through_the_stream(seed: int, tmp_path: Path) -> None:
    random = np.random.RandomState(seed)
    lengths = random.randint(0, 12, 20).tolist()
    data = IndexedDataset(pair(tmp_path / "a", lengths))
    dataset = GPTDataset(data, range(3, 18), 50, 5, seed)
    stream = np.concatenate([data[d] for d in dataset.indexes.document]).tolist()
    assert len(dataset) >= 50 and len(stream) % dataset.tokens_per_epoch == 0
    for i, row in enumerate(dataset.indexes.shuffle.tolist()):
        assert dataset[i].tolist() == stream[5 * row : 5 * row + 6]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_billions_of_tokens_stay_in_64_bits() -> None:
    lengths = np.full(40, 2**30, dtype=np.int32)
    made = build_indexes(lengths, range(40), None, 2**28, seed=1)
    assert made.sample.min() >= 0 and len(made.sample) == 160
    assert np.all(np.diff(made.sample[:, 0].astype(np.int64)) >= 0) and made.sample[-1].tolist() == [39, 3 * 2**28]


def test_splits() -> None:
    assert split_documents("969,30,1", 559) == (range(542), range(542, 558), range(558, 559))
    assert split_documents("80/20", 5) == (range(4), range(4, 5), range(5, 5))
    assert split_documents("1", 3)[0] == range(3)
    for bad in ("", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf"):
        with pytest.raises(Refused, match="--split 969,30,1"):
            split_documents(bad, 10)


def test_blend_order_by_hand() -> None:
    assert blend_order([0.5, 0.25, 0.25], 8)[0].tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    which, within = blend_order([0.5, 0.25, 0.25], 8)
    assert within.tolist() == [0, 0, 0, 1, 2, 1, 1, 3]
    assert blend_order([1.0], 3)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("weights", [[0.001, 0.999], [3, 1, 2], [0.2] * 40, [1e-9, 1.0, 1e-9]])
def test_every_prefix_of_a_blend_keeps_the_shares(weights: list[float]) -> None:
    shares = normalized(weights)
    which, within = blend_order(shares, 2000)
    drawn = np.cumsum(which[:, None] == np.arange(len(shares)), axis=0)
    assert np.all(np.abs(drawn - np.arange(1, 2001)[:, None] * shares) <= 1.5)
    for k in range(len(shares)):
        assert within[which == k].tolist() == list(range(int(drawn[-1, k])))


@pytest.mark.parametrize(("sources", "power"), [(20, 1.0), (60, 0.0), (60, 1.0), (60, 5.0)])
@pytest.mark.parametrize(("block", "candidates"), [(4, 8), (16, 16), (128, 512)])
def test_many_sources_follow_the_same_rule(
    sources: int, power: float, block: int, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is looked at: the largest lag, the first of several (power 0: all weights are equal)."""
    monkeypatch.setattr(orders, "BLOCK", block)
    monkeypatch.setattr(orders, "CANDIDATES", candidates)
    shares = normalized([(1 + k * 37 % sources) ** power for k in range(sources)])
    taken, order = [0] * sources, []
    for t in range(500):
        lags = [w * max(t, 1) - n for w, n in zip(shares, taken, strict=True)]
        order.append((lags.index(max(lags)), taken[lags.index(max(lags))]))
        taken[order[-1][0]] += 1
    which, within = blend_order(shares, 500)
    assert list(zip(which.tolist(), within.tolist(), strict=True)) == order


def test_blends_draw_from_every_source_and_wrap(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a", [9] * 4), pair(tmp_path / "b", [50] * 20)
    said: list[str] = []
    blended, _ = build_datasets(config("3", a, "1", b), 1, (400, 0), said.append)
    assert blended is not None and len(blended) == 400 and len(items(blended)) == 400
    assert any(line.strip().startswith("share  75.000%: 300 samples, 1,200 tokens, 33.3 epochs of") for line in said)
    by_size = train(a, b, count=20)
    assert len(by_size) == 20
    assert len(train(a, b, count=1000)) >= 1000  # more than one epoch of both
    assert len(train("0", a, "2", b, count=10)) >= 10
    rare = train("1e-12", a, "1", b, count=300)
    assert len(items(rare)) >= 300


def test_order_depends_on_seed_alone(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [13] * 9)
    first = items(train(prefix, seed=1))
    assert items(train(prefix, seed=1)) == first != items(train(prefix, seed=2))


def test_a_longer_run_keeps_the_order_of_the_one_it_continues(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [13] * 9)
    short = items(train(prefix, count=30), 30)
    longer, valid = build_segments(config(prefix), 1, (30, 40), 0, quiet)
    assert valid is None and len(longer) == 70 and items(longer, 30) == short
    assert items(longer)[30:] == items(train(prefix, count=40, seed=2), 40)
    with pytest.raises(IndexError):
        longer[70]
    held_out = build_segments(config(prefix, split="8,1,0"), 1, (3, 4), 2, quiet)[1]
    assert held_out is not None and len(held_out) >= 2
    with pytest.raises(ValueError, match="at least one"):
        build_segments(config(prefix), 1, (3, 0), 0, quiet)


def test_validation_has_its_own_documents_or_its_own_data(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a", [13] * 10), pair(tmp_path / "b", [11] * 10)
    both = build_datasets(config(a, split="80,20,0"), 1, (20, 5), quiet)
    assert both[0] is not None and both[1] is not None
    seen = [{token for item in items(dataset) for token in item} for dataset in both if dataset is not None]
    assert max(seen[0]) < 104 <= min(seen[1])
    trained, valid = build_datasets(config(a, valid_data_path=(b,)), 1, (50, 5), quiet)
    assert trained is not None and valid is not None and max(map(max, items(trained))) >= 125
    said: list[str] = []
    assert build_datasets(config(a), 1, (20, 5), said.append)[1] is None and "no validation" in said[-1]
    assert build_datasets(config(a, split="80,20,0"), 1, (0, 0), quiet) == (None, None)


def test_prefixes_are_found(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "my_gpt_text_document", [13] * 9)
    for given in (tmp_path / "my_gpt", prefix, prefix + ".bin", prefix + ".idx", tmp_path):
        assert find_prefixes(str(given), "--data-path") == [prefix]
    pair(tmp_path / "z", [5, 6])
    assert find_prefixes(str(tmp_path), "--data-path") == [prefix, str(tmp_path / "z")]
    assert len(train(str(tmp_path))) >= 10


def test_the_cache_is_used_checked_and_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = pair(tmp_path / "a", [13] * 9)
    train(prefix)
    assert not (tmp_path / "isotron_index_cache").exists()  # too small to keep
    monkeypatch.setattr("isotron.data.index_cache.KEEP", 0)
    said: list[str] = []
    first = items(build_datasets(config(prefix), 1, (10, 0), said.append)[0])  # type: ignore[arg-type]
    directory = tmp_path / "isotron_index_cache"
    assert sorted(p.suffix for p in directory.iterdir()) == [".json", ".npy", ".npy", ".npy"]
    assert any("building the index of" in line for line in said)
    said.clear()
    assert items(build_datasets(config(prefix), 1, (10, 0), said.append)[0]) == first  # type: ignore[arg-type]
    assert not any("building" in line for line in said)
    next(directory.glob("*-sample.npy")).write_bytes(b"damaged")
    assert items(train(prefix)) == first
    pair(tmp_path / "a", [13] * 8 + [14])  # other data under the same name
    assert items(train(prefix)) != first

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert len(train(prefix, seed=7)) >= 10
    with pytest.raises(Refused, match="--data-cache-path .*\n.*No space left"):
        train(prefix, seed=8, data_cache_path=str(tmp_path / "cache"))


def test_cache_entries_of_another_description_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotron.data.index_cache.KEEP", 0)
    cache = IndexCache(tmp_path, quiet)
    for n in (1, 2):
        assert cache.get({"n": n}, Expected(8, 0.0, ""), lambda n=n: {"x": np.arange(n)})["x"].tolist() == list(
            range(n)
        )  # type: ignore[misc]
    entry = min(tmp_path.glob("*.json"))
    entry.write_text(entry.read_text().replace('"n"', '"m"'))
    for n in (1, 2):
        assert cache.get({"n": n}, Expected(8, 0.0, ""), lambda n=n: {"x": np.arange(n)})["x"].tolist() == list(
            range(n)
        )  # type: ignore[misc]


def test_mock_data() -> None:
    made, valid = build_datasets(DataConfig(mock_data=True, seq_length=200), 3, (50, 4), quiet, vocab_size=32, eod=5)
    assert made is not None and valid is not None and (len(made), len(valid)) == (50, 4)
    item = made[7]
    assert item.dtype == np.int64 and len(item) == 201 and item.tolist() == made[7].tolist() != made[8].tolist()
    assert made[0].tolist() != valid[0].tolist()
    every = np.concatenate([made[i] for i in range(50)])
    assert every.min() >= 0 and every.max() < 32 and 5 in every
    plain, _ = build_datasets(DataConfig(mock_data=True, seq_length=8), 3, (2, 0), quiet)
    assert plain is not None and max(map(max, items(plain))) < 256
    with pytest.raises(IndexError):
        made[50]


@pytest.mark.parametrize(
    ("paths", "options", "said"),
    [
        ((), {}, "--mock-data"),
        ((), {"valid_data_path": ("x",)}, "no --data-path with --valid-data-path x"),
        (("PREFIX",), {"mock_data": True}, "either made up or read"),
        (("nowhere",), {}, "nowhere_text_document.idx"),
        (("DIR/sub",), {}, "holds no .idx file"),
        (("DIR/text.jsonl",), {}, "a file of another kind"),
        (("-1", "PREFIX"), {}, "weights are finite numbers >= 0"),
        (("0", "PREFIX"), {}, "not all 0"),
        (("nan", "PREFIX"), {}, "weights are finite"),
        (("1", "PREFIX", "PREFIX"), {}, "either every prefix has a weight"),
        (("1", "DIR", "1", "PREFIX"), {}, "the directory holds 2 datasets"),
        (
            ("PREFIX",),
            {"seq_length": 40},
            "the training part has 4 of its 4 documents, which hold 36 tokens; one sample takes 41",
        ),
        (("PREFIX",), {"split": "99,1,0"}, "the validation part has 0 of its 4 documents"),
        (("PREFIX",), {"split": "1,99,0"}, "the training part has 0 of its 4 documents"),
        (("PREFIX",), {"split": "x"}, "--split x"),
    ],
)
def test_refusals(paths: tuple[str, ...], options: dict[str, object], said: str, tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [9] * 4)
    pair(tmp_path / "b", [9] * 4)
    (tmp_path / "sub").mkdir()
    (tmp_path / "text.jsonl").write_text("{}")
    given = tuple(p.replace("PREFIX", prefix).replace("DIR", str(tmp_path)) for p in paths)
    with pytest.raises(Refused) as refused:
        build_datasets(config(*given, **options), 1, (5, 5), quiet)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("lengths", "options", "counts", "fix"),
    [
        ([9] * 10, {"split": "99,1,0"}, (5, 5), "--split 90,10,0, or --eval-iters 0, or more data"),
        ([5, 4], {"split": "50,50,0"}, (0, 5), "--eval-iters 0, or more data"),
        ([9] * 10, {"split": "1,99,0"}, (5, 0), "--split 100,0,0, or more data"),
        ([9] * 4, {"seq_length": 40}, (5, 0), "--seq-length 35 --split 100,0,0, or more data"),
    ],
)
def test_a_part_that_is_too_short_names_a_way_out_that_works(
    lengths: list[int], options: dict[str, object], counts: tuple[int, int], fix: str, tmp_path: Path
) -> None:
    prefix = pair(tmp_path / "a", lengths)
    with pytest.raises(Refused) as refused:
        build_datasets(config(prefix, **options), 1, counts, quiet)
    assert refused.value.problems[0].fix == fix
    words = fix.split(", or ")[0].split()
    given = {w[2:].replace("-", "_"): v for w, v in zip(words[::2], words[1::2], strict=True)}
    if "eval_iters" not in given:
        changed = {**options, **{k: int(v) if k == "seq_length" else v for k, v in given.items()}}
        build_datasets(config(prefix, **changed), 1, counts, quiet)


def test_the_log_names_segments_and_shares(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [13] * 9)
    said: list[str] = []
    build_segments(config(prefix), 1, (3, 4), 0, said.append, consumed=3)
    assert said[0] == "training data, segment 1 of 2 (finished): 3 samples of 4 tokens"
    assert said[1].startswith("  share 100.000%: 3 samples") and said[2].startswith("training data, segment 2 of 2: 4")
    said.clear()
    build_segments(config(prefix), 1, (3,), 0, said.append)
    assert said[0].startswith("training data: 3 samples")
    assert count_sources(config(prefix)) == [[9, 117]] and count_sources(config(mock_data=True)) == []


def test_seeds_ids_and_notes_are_checked(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", [9] * 4)
    with pytest.raises(Refused, match="--seed -1"):
        train(prefix, seed=-1)
    small, _ = build_datasets(config(prefix), 1, (5, 0), quiet, vocab_size=20)
    assert small is not None
    with pytest.raises(Refused, match="vocabulary of 20\nbut: .*ids"):
        items(small)
    write_info(prefix, {"tokenizer": {"vocab_size": 50, "eod": 3, "type": "T"}, "append_eod": False})
    with pytest.raises(Refused, match="preprocessed with 50 entries"):
        build_datasets(config(prefix), 1, (5, 0), quiet, vocab_size=49)
    with pytest.raises(Refused, match="its documents end with id 3"):
        build_datasets(config(prefix), 1, (5, 0), quiet, vocab_size=50, eod=4)
    with pytest.raises(Refused, match="--reset-attention-mask with data .*\n.*no end-of-document id"):
        train(prefix, reset_attention_mask=True)


def test_validation_sets_apart(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a_text_document", [13] * 9), pair(tmp_path / "b", [11] * 9)
    options = config(a, valid_data_path=(a, b), multiple_validation_sets=True)
    _, sets = build_segments(options, 1, (3,), 5, quiet)
    assert isinstance(sets, dict) and list(sets) == ["valid/a", "valid/b"] and all(len(s) >= 5 for s in sets.values())
    assert build_segments(options, 1, (3,), 0, quiet)[1] is None


def test_indexes_built_ahead_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isotron.commands.build_index import build_index
    from isotron.config.schema import RunConfig, changed

    monkeypatch.setattr("isotron.data.index_cache.KEEP", 0)
    prefix, cache = pair(tmp_path / "a", [13] * 90), str(tmp_path / "cache")
    sizes = {"train_iters": 6, "global_batch_size": 2, "eval_iters": 0, "seq_length": 4, "vocab_size": 60_000}
    run = changed(RunConfig(), data_path=(prefix,), split="1", data_cache_path=cache, **sizes)
    assert build_index(run) == 0
    said: list[str] = []
    build_segments(run.data, run.train.seed, [12], 0, said.append, vocab_size=60_000)
    assert said and not any("building the index" in line for line in said)
    with pytest.raises(Refused, match="without --load"):
        build_index(changed(run, load="runs/first"))
