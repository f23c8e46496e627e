"""Every optimizer in every kind of layout: float64 against one process, checkpoints into other layouts, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isotron.core.errors import Refused
from isotron.core.optim.config import METHODS, OptimConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, measure
from tests.matrix import MODELS, equals_one_process, faults, reference_of
from tests.ranks import runs

Ranks = Callable[..., list[Any]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "DP2 zero 0": {"dp": 2, "zero": 0},
    "DP2 zero 1": {"dp": 2, "zero": 1},
    "DP2 zero 2": {"dp": 2, "zero": 2},
    "DP2 zero 3 x TP2": {"dp": 2, "tp": 2, "zero": 3},
    "uneven": {"dp": 2, "pp": 2, "layers_per_stage": (4, 1)},
    "TP4 over 2 KV heads": {"tp": 4, "sequence_parallel": True},
}
MIXED = ("layers.1.*:lr_mult=0.5,wd_mult=2", "*norm*:optimizer=sgd", "layers.0.mlp.*:optimizer=adam_l2")
# with their own epsilons: what a gradient is by rounding alone (gpt's key biases) must not become a step
CONFIGS: dict[str, OptimConfig] = {
    **{name: OptimConfig(name, clip_grad=1.0) for name in METHODS},
    "mixed": OptimConfig("muon", muon_others="lion", param_groups=MIXED),
    "frozen": OptimConfig("muon", freeze=("embed.*", "layers.[0-2].attention.*", "*norm*")),
}
# muon and adafactor travel, so they go everywhere; the others see elements only and take a layout or two each
TRAVEL = ("TP2xPP2", "DP2 zero 2", "DP2 zero 3 x TP2", "uneven", "TP4 over 2 KV heads")
QUICK = [("muon", "llama", name) for name in TRAVEL] + [("adafactor", "gpt", name) for name in TRAVEL[:-1]] + [
    ("muon", "gpt", "DP2 zero 1"), ("adafactor", "gpt", "TP2"), ("adafactor", "llama", "DP2 zero 0"),
    ("adafactor", "llama", TRAVEL[-1]), ("adamw", "gpt", "uneven"), ("adam_l2", "gpt", "TP2xPP2"),
    ("sgd", "gpt", "DP2 zero 1"), ("lion", "gpt", "TP2"), ("lion", "gpt", "DP2 zero 0"),
    ("mixed", "llama", "uneven"), ("mixed", "gpt", "DP2 zero 3 x TP2"),
    ("frozen", "llama", "TP2xPP2"), ("frozen", "llama", "DP2 zero 2"),
]  # fmt: skip
REST = [(c, m, name) for c in CONFIGS for m in ("gpt", "llama") for name in LAYOUTS if (c, m, name) not in QUICK]


def case_of(config: str, model: str, name: str, steps: int) -> Case:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, **LAYOUTS[name]})
    return Case(MODELS[model], layout, sequence=16, global_batch=4, steps=steps, optim=CONFIGS[config])


@pytest.mark.parametrize(("config", "model", "name"), QUICK)
def test_equal_to_one_process(ranks: Ranks, config: str, model: str, name: str) -> None:
    equals_one_process(ranks, case_of(config, model, name, 3), name)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "model", "name"), REST)
def test_equal_to_one_process_everywhere(ranks: Ranks, config: str, model: str, name: str) -> None:
    equals_one_process(ranks, case_of(config, model, name, 5), name)


@pytest.mark.parametrize("config", METHODS)
def test_a_sum_that_is_left_out_shows_under_every_rule(ranks: Ranks, config: str) -> None:
    case = replace(case_of(config, "gpt", "TP2", 2), inject="drop-allreduce")
    bad = faults(ranks(2, measure, case)[0], reference_of(case))
    assert {line.split()[0] for line in bad} >= {"gradient", "weight"}


# ---- checkpoints -----------------------------------------------------------------------------------------------------

# one run that keeps everything differently: muon's and lion's momentum in int8 and bfloat16, masters in two halves
STATES: dict[str, dict[str, Any]] = {
    "narrow adamw": {"dtype": "bfloat16", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "bfloat16",
                     "master_remainders": True},
    "muon": {"dtype": "bfloat16", "optimizer": "muon", "muon_others": "lion", "exp_avg_dtype": "bfloat16"},
    "sgd": {"optimizer": "sgd", "exp_avg_dtype": "int8"},
    "adafactor": {"dtype": "bfloat16", "optimizer": "adafactor", "master_remainders": True},
    "muon in int8": {"optimizer": "muon", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"},
}  # fmt: skip
OTHERS = {"TP2": {"tp": 2}, "DP2": {"dp": 2}, "PP2": {"pp": 2}}


@pytest.mark.parametrize("states", STATES)
def test_states_go_into_other_layouts_and_back_bitwise(ranks: Ranks, tmp_path: Path, states: str) -> None:
    """Saved at DP2 x PP2, saved again from other layouts without a step, and resumed as if nothing had been."""
    home = str(tmp_path / "home")
    # rows of 256 columns: with two tensor-parallel ranks an int8 block of 128 is on one of them
    wide = {"hidden_size": 256, "ffn_hidden_size": 256, "num_layers": 2}
    cfg = runs.config("llama", **STATES[states], **wide, dp=2, pp=2, train_iters=4, save=home, save_interval=2)
    assert ranks(4, runs.train, cfg, home) == [0] * 4
    saved = runs.tensors(runs.step_dir(home, 2))
    there = home
    for name, layout in OTHERS.items():
        there, before = str(tmp_path / name), there
        again = runs.changed(cfg, **{"dp": 1, "pp": 1, "train_iters": 2, "lr_decay_iters": 4, **layout},
                             load=runs.step_dir(before, 2), save=there)  # fmt: skip
        assert ranks(2, runs.train, again, there) == [0] * 2
        runs.assert_same(saved, runs.tensors(runs.step_dir(there, 2)))
    rest = str(tmp_path / "rest")
    assert ranks(4, runs.train, runs.changed(cfg, load=runs.step_dir(there, 2), save=rest), rest) == [0] * 4
    runs.assert_same(runs.tensors(runs.step_dir(home, 4)), runs.tensors(runs.step_dir(rest, 4)))


def test_patterns_that_match_nothing_are_refused_on_every_rank(ranks: Ranks) -> None:
    layout = Layout(dp=2, make_vocab_size_divisible_by=8)
    case = Case(MODELS["llama"], layout, sequence=16, optim=OptimConfig(freeze=("layers.9.*",)))
    with pytest.raises(Refused, match=r"--freeze layers\.9\.\*"):
        ranks(2, measure, case)
