"""DeepSpeed's JSON: batch arithmetic, what is read, what is refused by name; its schedules step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotron.core.engine.config import batch_sizes, read
from isotron.core.engine.rates import rate
from isotron.core.errors import Refused

M, G, B = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({B: 32}, (8, 1, 32)),
        ({B: 32, G: 2}, (4, 2, 32)),
        ({B: 32, M: 2}, (2, 4, 32)),
        ({M: 2}, (2, 1, 8)),
        ({M: 2, G: 3}, (2, 3, 24)),
        ({G: 3}, (1, 3, 12)),
        ({B: 32, M: 2, G: 4}, (2, 4, 32)),
        ({B: 32, M: "auto", G: "auto"}, (8, 1, 32)),
        ({B: "auto", M: 2, G: "auto"}, (2, 1, 8)),
    ],
)
def test_two_sizes_give_the_third(given: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    assert batch_sizes(given, 4) == sizes


@pytest.mark.parametrize("given", [{}, {B: 30}, {B: 32, M: 3}, {B: 32, M: 2, G: 2}, {M: -1}, {M: 1.5}, {B: "auto"}])
def test_sizes_that_do_not_fit_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        batch_sizes(given, 4)


def test_what_is_read(tmp_path: Path) -> None:
    tree = {
        B: 16,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 10, "hysteresis": 3},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e6},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": "auto"}},
        "wall_clock_breakdown": False,
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(tree))
    for source in (tree, path, str(path)):
        cfg = read(source, 2)
        assert (cfg.micro_batch, cfg.accumulation, cfg.global_batch) == (8, 1, 16)
        assert (cfg.dtype, cfg.zero, cfg.bucket_size, cfg.optimizer) == ("float16", 2, 5_000_000, "adamw")
        assert (cfg.optim.clip_grad, cfg.optim.initial_loss_scale, cfg.optim.hysteresis) == (1.0, 4096.0, 3)
        assert cfg.reduce_dtype == "bfloat16"
        assert (cfg.lr, cfg.weight_decay, cfg.optim.adam_beta1, cfg.optim.adam_beta2) == (1e-4, 0.01, 0.8, 0.99)
        assert cfg.scheduler_params == {"total_num_steps": 100}
    l2 = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert read({B: 1, "optimizer": l2}, 1).optimizer == "adam_l2"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"amp": {"enabled": True}}, '"amp"'),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, '"zero_optimization.zero_hpz_partition_size"'),
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2, 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "tape"}}}, "none, cpu and nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 3}}}, "offload_optimizer.ratio"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "a table of its own"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "below stage 3"),
        ({"offload_optimizer": {"device": "cpu"}}, '"zero_optimization": {"offload_optimizer": {...}}'),
        ({"offload_optimizer": {"device": "cpu"}}, "belongs into zero_optimization"),
        ({"stage": 2}, '"zero_optimization": {"stage": ...}'),
        ({"lr": 2}, '"optimizer": {"params": {"lr": ...}}'),
        ({"zero_optimization": {"fp16": {"enabled": True}}}, '"fp16": {...}'),
        ({"fp16": True}, "a table of its own"),
        ({"communication_data_type": "fp8"}, "fp32, fp16, bf16"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "type of 16-bit weights"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "weights have one type"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "Adam, AdamW, SGD, Lion and Muon"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params.nesterov"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as refused:
        read({B: 4, **tree}, 1)
    assert words in str(refused.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read as JSON"):
        read(tmp_path / "none.json", 1)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(Refused, match="it is no table"):
        read(tmp_path / "list.json", 1)


# what DeepSpeed 0.19.8 sets before updates 0, 1, 3, 8, 15 and 25
STEPS = (0, 1, 3, 8, 15, 25)
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 6, "cycle_second_step_size": 4,
         "decay_lr_rate": 0.5, "decay_step_size": 2, "cycle_momentum": False}  # fmt: skip
RANGE = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}


@pytest.mark.parametrize(
    ("name", "params", "rates"),
    [
        ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 7},
         (1e-05, 1e-05, 0.000568929, 0.001, 0.001, 0.001)),
        ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 7, "warmup_type": "linear"},
         (0.0, 0.0, 0.000285714, 0.001, 0.001, 0.001)),
        ("WarmupDecayLR", {"total_num_steps": 20, "warmup_max_lr": 1e-3, "warmup_num_steps": 5},
         (0.0, 0.0, 0.000682606, 0.000866667, 0.0004, 0.0)),
        ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_min_ratio": 0.1},
         (0.0, 0.001, 0.007143456, 0.00904518, 0.00250075, 1e-06)),
        ("OneCycle", CYCLE, (0.0001, 0.00025, 0.00055, 0.00055, 4.4444e-05, 2.1053e-05)),
        ("LRRangeTest", RANGE, (0.0001, 0.000166667, 0.0003, 0.000633333, 0.0011, 0.001766667)),
        ("LRRangeTest", {**RANGE, "lr_range_test_staircase": True}, (0.0001, 0.0001, 0.0003, 0.0005, 0.0011, 0.0017)),
    ],
)  # fmt: skip
def test_schedules(name: str, params: dict[str, Any], rates: tuple[float, ...]) -> None:
    at = rate(name, params, 0.01)
    assert [at(n) for n in STEPS] == pytest.approx(rates, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "params"),
    [("CosineLR", {}), ("WarmupLR", {"steps": 3}), ("WarmupDecayLR", {}), ("WarmupLR", {"warmup_type": "square"}),
     ("OneCycle", {**CYCLE, "cycle_momentum": True})],
)  # fmt: skip
def test_schedules_that_are_not_known_are_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        rate(name, params, 0.01)
