"""Every optimizer in every kind of layout: float64 against one process, checkpoints into other layouts, settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isotron.core.errors import Refused
from isotron.core.optim.config import METHODS, OptimConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, measure
from tests.matrix import MODELS, faults, reference_of
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
CONFIGS: dict[str, OptimConfig] = {
    **{name: OptimConfig(name, clip_grad=1.0, adam_eps=1e-6, adafactor_eps=1e-6) for name in METHODS},
    "mixed": OptimConfig("muon", adam_eps=1e-6, muon_others="lion", param_groups=MIXED),
    "frozen": OptimConfig("muon", adam_eps=1e-6, freeze=("embed.*", "layers.[0-2].attention.*", "*norm*")),
}
# muon and adafactor travel, so they go everywhere; the others see elements only and take a layout or two each
TRAVEL = ("TP2xPP2", "DP2 zero 2", "DP2 zero 3 x TP2", "uneven", "TP4 over 2 KV heads")
QUICK = [(config, name) for config in ("muon", "adafactor") for name in TRAVEL] + [
    ("muon", "DP2 zero 1"), ("adafactor", "TP2"), ("adafactor", "DP2 zero 0"),
    ("adamw", "uneven"), ("adam_l2", "TP2xPP2"), ("sgd", "DP2 zero 1"), ("lion", "TP2"), ("lion", "DP2 zero 0"),
    ("mixed", "uneven"), ("mixed", "DP2 zero 3 x TP2"), ("frozen", "TP2xPP2"), ("frozen", "DP2 zero 2"),
]  # fmt: skip
REST = [(c, name) for c in CONFIGS for name in LAYOUTS if (c, name) not in QUICK]


def check(ranks: Ranks, config: str, name: str, steps: int = 3) -> None:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, **LAYOUTS[name]})
    case = Case(MODELS["llama"], layout, sequence=16, global_batch=4, steps=steps, optim=CONFIGS[config])
    bad = faults(ranks(layout.world, measure, case, timeout=120)[0], reference_of(case))
    assert not bad, "\n".join(bad[:8])


@pytest.mark.parametrize(("config", "name"), QUICK)
def test_equal_to_one_process(ranks: Ranks, config: str, name: str) -> None:
    check(ranks, config, name)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name"), REST)
def test_equal_to_one_process_everywhere(ranks: Ranks, config: str, name: str) -> None:
    check(ranks, config, name, steps=5)


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
