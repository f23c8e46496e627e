"""Resuming: bit for bit in the same layout, with the same numbers in any other, from float32 to 16 bits and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isotron.data.build import build_segments
from isotron.train import loop
from tests.ranks import runs

LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "DP2": {"dp": 2},
    "DP2 zero 0": {"dp": 2, "zero": 0},
    "TP2xPP2": {"tp": 2, "pp": 2},
}


def world(layout: dict[str, Any]) -> int:
    return int(layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half as many documents: ten steps end in the second epoch."""
    return runs.write_data(tmp_path_factory.mktemp("few"), documents=15)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "dtype"), [("gpt", "bfloat16"), pytest.param("gpt", "float32", marks=pytest.mark.slow)]
)
def test_resumed_equals_uninterrupted_bitwise(
    ranks: Any, tmp_path: Path, few: str, model: str, dtype: str, layout: str
) -> None:
    size = world(LAYOUTS[layout])
    whole, rest = str(tmp_path / "whole"), str(tmp_path / "rest")
    lengths = {"train_iters": 10, "save_interval": 5}
    cfg = runs.config(model, dtype=dtype, data_path=(few,), save=whole, **lengths, **LAYOUTS[layout])
    assert ranks(size, runs.train, cfg, whole) == [0] * size
    resumed = runs.changed(cfg, load=runs.step_dir(whole, 5), save=rest)
    assert ranks(size, runs.train, resumed, rest) == [0] * size
    runs.assert_same(runs.tensors(runs.step_dir(whole, 10)), runs.tensors(runs.step_dir(rest, 10)))
    for key in ("loss", "grad_norm", "lr", "sample_ids"):
        first, second = runs.lines(whole, key), runs.lines(rest, key)
        assert sorted(second) == list(range(6, 11))
        assert second == {step: first[step] for step in second}, key


def test_a_falling_loss_scale_goes_on_bitwise(ranks: Any, tmp_path: Path, words: str) -> None:
    whole, rest = str(tmp_path / "whole"), str(tmp_path / "rest")
    half = {"dtype": "float16", "initial_loss_scale": 2.0**32, "loss_scale_window": 3, "hysteresis": 2}
    cfg = runs.config("gpt", data_path=(words,), save=whole, train_iters=24, save_interval=6, dp=2, **half)
    assert ranks(2, runs.train, cfg, whole) == [0, 0]
    meta = [runs.Source(runs.step_dir(whole, s)).manifest.meta for s in (6, 24)]
    assert meta[0]["updates"] < 6 and 0 < meta[1]["updates"] < 24 and meta[0]["scaler"] != meta[1]["scaler"]
    for start in (6, 18):
        resumed = runs.changed(cfg, load=runs.step_dir(whole, start), save=rest)
        assert ranks(2, runs.train, resumed, rest) == [0, 0]
        runs.assert_same(runs.tensors(runs.step_dir(whole, 24)), runs.tensors(runs.step_dir(rest, 24)))
        assert runs.Source(runs.step_dir(rest, 24)).manifest.meta["scaler"] == meta[1]["scaler"]
        assert {s: v for s, v in runs.lines(rest).items() if s > start} == {
            s: v for s, v in runs.lines(whole).items() if s > start
        }


def test_saving_changes_nothing(ranks: Any, tmp_path: Path, words: str) -> None:
    often, once = str(tmp_path / "often"), str(tmp_path / "once")
    cfg = runs.config("gpt", data_path=(words,), train_iters=6, dp=2)
    jobs = [(runs.changed(cfg, save=often, save_interval=1), often), (runs.changed(cfg, save=once), once)]
    assert ranks(2, runs.train_each, jobs) == [[0, 0]] * 2
    runs.assert_same(runs.tensors(runs.step_dir(often, 6)), runs.tensors(runs.step_dir(once, 6)))
    assert len(list(Path(often).glob("step_*"))) == 6 and len(list(Path(once).glob("step_*"))) == 1


OTHERS: dict[str, dict[str, Any]] = {
    "TP4": {"tp": 4, "sequence_parallel": True},
    "PP4": {"pp": 4},
    "1": {},
    "DP4 zero 0": {"dp": 4, "zero": 0, "micro_batch_size": 1},
    "TP2xDP2": {"tp": 2, "dp": 2},
    "PP2x2chunks": {"pp": 2, "vpp": 2, "layers_per_stage": (1.5, 1, 1, 1.5)},
}
# more heads, so that TP4 has some left to share; five blocks, which no number of stages here divides
WIDE = {"num_layers": 5, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory, words: str) -> Any:
    """A run of 10 steps at DP2xPP2 that saved step 5, made once per model and dtype: (config, directory)."""
    made: dict[tuple[str, str], tuple[Any, str]] = {}

    def get(model: str, dtype: str) -> tuple[Any, str]:
        if (model, dtype) not in made:
            home = str(tmp_path_factory.mktemp(f"{model}-{dtype}"))
            cfg = runs.config(
                model, dtype=dtype, data_path=(words,), dp=2, pp=2, train_iters=10, save=home, save_interval=5, **WIDE
            )
            assert ranks(4, runs.train, cfg, home) == [0] * 4
            made[model, dtype] = cfg, home
        return made[model, dtype]

    return get


def at_once_and_on(cfg: Any, home: str, there: str, **leaves: Any) -> list[tuple[Any, str]]:
    """Jobs in another layout: save step 5 again without a step, then train from there to step 10."""
    cfg = runs.changed(cfg, **{"dp": 1, "pp": 1, "save_interval": 0, **leaves})
    again = runs.changed(cfg, train_iters=5, lr_decay_iters=10, load=runs.step_dir(home, 5), save=f"{there}/again")
    return [(again, f"{there}/again"), (runs.changed(cfg, load=f"{there}/again", save=f"{there}/on"), f"{there}/on")]


def others() -> list[Any]:
    """Every layout in float64; two in float32, where heads are shared and where blocks are cut into chunks."""
    found = []
    for model, dtype in (("gpt", "float64"), ("llama", "float32"), ("llama", "float64")):
        often = {"gpt": tuple(OTHERS), "llama": ("TP4", "PP2x2chunks") if dtype == "float32" else ()}[model]
        found += [pytest.param(model, dtype, n, marks=() if n in often else pytest.mark.slow) for n in OTHERS]
    return found


@pytest.mark.parametrize(("model", "dtype", "layout"), others())
def test_another_layout_goes_on_with_the_same_numbers(
    ranks: Any, tmp_path: Path, saved: Any, model: str, dtype: str, layout: str
) -> None:
    cfg, home = saved(model, dtype)
    size = world(OTHERS[layout])
    jobs = at_once_and_on(cfg, home, str(tmp_path), **OTHERS[layout])
    assert ranks(size, runs.train_each, jobs) == [[0, 0]] * size
    runs.assert_same(runs.tensors(runs.step_dir(home, 5)), runs.tensors(runs.step_dir(tmp_path / "again", 5)))
    before, after = runs.lines(home), runs.lines(tmp_path / "on")
    assert sorted(after) == [6, 7, 8, 9, 10]
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert after == {step: pytest.approx(before[step], rel=tolerance) for step in after}
    ids = runs.lines(home, "sample_ids")
    assert runs.lines(tmp_path / "on", "sample_ids") == {step: ids[step] for step in after}


@pytest.mark.parametrize("layout", ["1", "TP2xDP2"])
def test_masters_go_from_16_bits_to_float32_and_back(ranks: Any, tmp_path: Path, saved: Any, layout: str) -> None:
    cfg, home = saved("llama", "bfloat16")
    size = world(OTHERS[layout])
    wide, narrow = str(tmp_path / "wide"), str(tmp_path / "narrow")
    jobs = at_once_and_on(cfg, home, wide, dtype="float32", **OTHERS[layout])[:1]
    jobs += at_once_and_on(cfg, f"{wide}/again", narrow, **OTHERS[layout])
    assert ranks(size, runs.train_each, jobs) == [[0, 0, 0]] * size
    old, new = runs.tensors(runs.step_dir(home, 5)), runs.tensors(runs.step_dir(f"{wide}/again", 5))
    masters = {n.removeprefix("master/"): t for n, t in old.items() if n.startswith("master/")}
    assert masters
    runs.assert_same(masters, new, masters)
    runs.assert_same(old, new, [n for n in old if n.startswith("exp_avg")])
    assert not any(n.startswith("master/") for n in new)
    runs.assert_same(old, runs.tensors(runs.step_dir(f"{narrow}/again", 5)))
    before, after = runs.lines(home), runs.lines(f"{narrow}/on")
    assert after == {step: pytest.approx(before[step], rel=2e-2) for step in range(6, 11)}


# ---- the data order of a run that is made longer -------------------------------------------------------------------


def rows_read(cfg: Any, run_dir: str) -> dict[int, list[int]]:
    """The tokens of every sample that a run takes in, by sample number."""
    read: dict[int, list[int]] = {}
    original = loop.one_step

    def spy(run: Any, batches: Any, samples: range) -> None:
        for batch in batches:
            for number, row in zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True):
                assert number not in read
                read[number] = row
        original(run, batches, samples)

    loop.one_step = spy
    try:
        assert runs.train(cfg, run_dir) == 0
    finally:
        loop.one_step = original
    return read


def rows_of(cfg: Any, segments: list[int]) -> list[list[int]]:
    """The samples of a data order, by number."""
    data, _ = build_segments(cfg.data, cfg.train.seed, segments, 0, lambda _: None, vocab_size=runs.VOCAB)
    return [data[i][:-1].tolist() for i in range(len(data))]


@pytest.mark.parametrize("mock", [False, True])
def test_a_longer_run_appends_to_the_data_order(ranks: Any, tmp_path: Path, words: str, mock: bool) -> None:
    home = str(tmp_path)
    source = {"mock_data": True} if mock else {"data_path": (words,)}
    cfg = runs.config("llama", **source, save=home, load=home, save_interval=5)
    read: dict[int, list[int]] = {}
    for steps in (10, 20, 30):
        (rows,) = ranks(1, rows_read, runs.changed(cfg, train_iters=steps), home)
        assert sorted(rows) == list(range(len(read), 4 * steps))
        read |= rows
        manifest = runs.Source(runs.step_dir(home, steps)).manifest
        assert manifest.meta["segments"] == [40] * (steps // 10)
        assert rows_of(cfg, manifest.meta["segments"]) == [read[n] for n in range(4 * steps)]
    for start in () if mock else (0, 40, 80):  # 40 samples are less than an epoch, so no row may come twice
        assert len({tuple(read[n]) for n in range(start, start + 40)}) == 40
    # from a checkpoint within a segment, the same samples again
    again = runs.changed(cfg, train_iters=30, load=runs.step_dir(home, 15), save=f"{home}/again")
    (rows,) = ranks(1, rows_read, again, f"{home}/again")
    assert rows == {n: read[n] for n in range(60, 120)}


def test_another_global_batch_goes_on_after_the_last_sample(ranks: Any, tmp_path: Path, words: str) -> None:
    home = str(tmp_path)
    cfg = runs.config("llama", data_path=(words,), save=home, load=home, train_iters=4)
    assert ranks(1, runs.train, cfg, home) == [0]
    larger = runs.changed(cfg, train_iters=6, global_batch_size=8)
    assert ranks(1, runs.train, larger, home) == [0]
    assert runs.lines(home, "sample_ids") == {1: [0, 3], 2: [4, 7], 3: [8, 11], 4: [12, 15], 5: [16, 23], 6: [24, 31]}
    assert runs.Source(runs.step_dir(home, 6)).manifest.meta["segments"] == [16, 16]


# ---- damage, places, repetition ------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over(ranks: Any, tmp_path: Path, words: str) -> None:
    home = str(tmp_path)
    cfg = runs.config("gpt", data_path=(words,), save=home, load=home, train_iters=6, save_interval=3, pp=2)
    assert ranks(2, runs.train, cfg, home) == [0, 0]
    good, losses = runs.tensors(runs.step_dir(home, 6)), runs.lines(home)
    file = max(Path(runs.step_dir(home, 6)).glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (code, said), (other, nothing) = ranks(2, runs.train_heard, cfg, home)
    assert code == other == 0 and not nothing
    assert "step_00000006 is not complete" in said and f"file {file.name} is damaged" in said
    assert f"resumed from {runs.step_dir(home, 3)} at step 3" in said
    runs.assert_same(good, runs.tensors(runs.step_dir(home, 6)))
    assert runs.lines(home) == losses


def test_checkpoints_go_to_save_and_metrics_to_the_run_directory(ranks: Any, tmp_path: Path) -> None:
    cfg = runs.config("llama", save=str(tmp_path / "kept"), train_iters=2)
    assert ranks(1, runs.train, cfg, str(tmp_path / "seen")) == [0]
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["latest", "step_00000002"]
    assert sorted(runs.lines(tmp_path / "seen")) == [1, 2]
    assert not list((tmp_path / "seen").glob("step_*"))


def test_a_finished_run_saves_again_only_elsewhere(ranks: Any, tmp_path: Path) -> None:
    cfg = runs.config("llama", save=str(tmp_path / "a"), train_iters=2)
    assert ranks(1, runs.train, cfg, str(tmp_path / "a")) == [0]
    manifest = tmp_path / "a" / "step_00000002" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    jobs = [(runs.changed(cfg, load=str(tmp_path / "a"), save=str(tmp_path / d)), str(tmp_path / d)) for d in "ab"]
    assert ranks(1, runs.train_each, jobs) == [[0, 0]]
    assert manifest.stat().st_mtime_ns == written
    runs.assert_same(runs.tensors(tmp_path / "a/step_00000002"), runs.tensors(tmp_path / "b/step_00000002"))


def test_one_process_trains_in_several_layouts_in_turn(ranks: Any, tmp_path: Path) -> None:
    layouts = [{"tp": 2}, {"dp": 2}, {"pp": 2}, {"tp": 2}]
    cfgs = [runs.config("llama", dtype="float64", train_iters=2, **layout) for layout in layouts]
    jobs = [(runs.changed(c, save=f"{tmp_path}/{i}"), f"{tmp_path}/{i}") for i, c in enumerate(cfgs)]
    assert ranks(2, runs.train_each, jobs) == [[0] * 4] * 2
    losses = [list(runs.lines(directory).values()) for _, directory in jobs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9) and losses[2] == pytest.approx(losses[0], rel=1e-9)
    assert losses[3] == losses[0]
    runs.assert_same(runs.tensors(runs.step_dir(jobs[0][1], 2)), runs.tensors(runs.step_dir(jobs[3][1], 2)))


# ---- evaluation ----------------------------------------------------------------------------------------------------

EVALUATED = {
    "1": {},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP4": {"pp": 4},
    "PP2x2chunks": {"pp": 2, "vpp": 2},
    "DP2": {"dp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_validation_loss_is_equal_in_every_layout(ranks: Any, tmp_path: Path, words: str, model: str) -> None:
    data = {"data_path": (words,), "split": "60,40,0", "eval_iters": 3, "eval_interval": 1}
    seen = {}
    for name, layout in EVALUATED.items():
        there = str(tmp_path / name)
        cfg = runs.config(model, dtype="float64", train_iters=2, num_layers=5, save=there, **data, **layout)
        assert ranks(world(layout), runs.train, cfg, there) == [0] * world(layout)
        seen[name] = runs.lines(there, "eval_loss")
        assert sorted(seen[name]) == [1, 2]
    for name, losses in seen.items():
        assert losses == {s: pytest.approx(seen["1"][s], rel=1e-9, abs=0) for s in losses}, name


def test_evaluation_changes_nothing_and_drops_nothing_out(ranks: Any, tmp_path: Path, words: str) -> None:
    def there(name: str) -> str:
        return str(tmp_path / name)

    cfg = runs.config("gpt", data_path=(words,), split="60,40,0", train_iters=4, dp=2, pp=2)
    seeing = runs.changed(cfg, eval_iters=2, eval_interval=1, save=there("seeing"))
    blind = runs.changed(cfg, save=there("blind"))
    assert ranks(4, runs.train_each, [(seeing, there("seeing")), (blind, there("blind"))]) == [[0, 0]] * 4
    runs.assert_same(runs.tensors(runs.step_dir(there("seeing"), 4)), runs.tensors(runs.step_dir(there("blind"), 4)))
    assert runs.lines(there("seeing")) == runs.lines(there("blind"))
    # the same weights in a model without dropout, which is evaluated once more at the end
    bare = runs.changed(seeing, hidden_dropout=0.0, attention_dropout=0.0, eval_interval=0, load=there("seeing"))
    assert ranks(4, runs.train, runs.changed(bare, save=there("bare")), there("bare")) == [0] * 4
    assert runs.lines(there("bare"), "eval_loss") == {4: runs.lines(there("seeing"), "eval_loss")[4]}
