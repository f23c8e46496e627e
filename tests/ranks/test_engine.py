"""The engine against torch alone: any module, ranks, stage and accumulation give the same float64 numbers."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import isotron
from isotron import cli
from isotron.core.checkpoint.ranks import SingleRank
from isotron.core.checkpoint.save import save_checkpoint
from isotron.core.engine.shard import shard
from isotron.core.errors import Refused
from tests.ranks import engine_bodies as bodies

Ranks = Callable[..., list[Any]]


def by_torch(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = bodies.STEPS
) -> dict[str, Tensor]:
    """The whole batch at once, gradients clipped to 0.5; what is unused has a gradient of zero."""
    model = bodies.net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(parameters)
    for step in range(steps):
        optimizer.zero_grad()
        bodies.loss_of(model, *bodies.batch(step)).backward()
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    return {n: t.detach() for n, t in model.state_dict().items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # the loss scale of one divides by norm + 1e-6 in float32 inside the fused update
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7), name


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, eps=1e-6)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_equals_torch(ranks: Ranks, tmp_path: Path, world: int, stage: int) -> None:
    cfg = bodies.config(zero_optimization={"stage": stage})
    straight = ranks(world, bodies.trained, cfg)
    same(straight[0][0], by_torch(adamw))
    stopped = ranks(world, bodies.trained, cfg, str(tmp_path))
    for (a, _, _), (b, _, _) in zip(straight, stopped, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    (onwards,) = ranks(1, bodies.resumed, bodies.config(), str(tmp_path))
    assert all(torch.allclose(onwards[n], straight[0][0][n], rtol=1e-9, atol=1e-12) for n in onwards)


def test_layouts_agree_to_1e_9(ranks: Ranks) -> None:
    alone = ranks(1, bodies.trained, bodies.config())[0]
    for stage in (0, 1, 2, 3):
        weights, norm, _ = ranks(2, bodies.trained, bodies.config(zero_optimization={"stage": stage}))[0]
        assert all(torch.allclose(weights[n], alone[0][n], rtol=1e-9, atol=1e-12) for n in weights)
        assert norm == pytest.approx(alone[1], rel=1e-9)


def test_gradients_travel_in_the_type_that_is_asked_for(ranks: Ranks) -> None:
    exact, narrow = (
        ranks(2, bodies.trained, bodies.config(zero_optimization={"stage": 2}, communication_data_type=kind))[0]
        for kind in ("fp32", "bf16")
    )
    assert narrow[1] != exact[1] and narrow[1] == pytest.approx(exact[1], rel=1e-2)
    half = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    wide, short = (ranks(2, bodies.trained, bodies.config(data_types={"grad_accum_dtype": kind}, **half))[0]
                   for kind in ("fp32", "bf16"))  # fmt: skip
    assert short[1] != wide[1] and short[1] == pytest.approx(wide[1], rel=2e-2)
    with pytest.raises(Refused, match="an optimizer of torch wants gradients of its parameters' type"):
        net = bodies.net(torch.float32)
        shard(net, torch.optim.AdamW(net.parameters()), zero=1, grad_dtype=torch.bfloat16)


def test_offloading_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for stage, tables in (
        (1, {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True}}),
        (3, {"offload_optimizer": disk, "offload_param": disk}),
        (3, {"offload_optimizer": disk, "offload_param": {"device": "cpu"}}),
    ):
        there, away = (
            ranks(2, bodies.trained, bodies.config(zero_optimization={"stage": stage, **more})) for more in ({}, tables)
        )
        assert all(torch.equal(a[n], b[n]) for (a, _, _), (b, _, _) in zip(there, away, strict=True) for n in a)
    assert ranks(2, bodies.places, bodies.config(zero_optimization={"stage": 3, **tables})) == [(True, True)] * 2


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adafactor"])
def test_an_optimizer_and_a_scheduler_of_torch(kind: str) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]
        options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "Adam": {"eps": 1e-6}, "Adafactor": {"d": 1.1}}[kind]
        return getattr(torch.optim, kind)(groups, lr=0.05, weight_decay=0.1, **options)

    model = bodies.net()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    cfg = bodies.config(optimizer=None)
    engine, returned, loader, scheduler = isotron.initialize(model, cfg, optimizer=optimizer, lr_scheduler=schedule)
    assert returned is optimizer and scheduler is schedule and loader is None
    bodies.run(engine, 0, bodies.STEPS)
    reference = bodies.net()
    parameters = [p for p in reference.parameters() if p.requires_grad]
    theirs = make(parameters)
    falling = torch.optim.lr_scheduler.StepLR(theirs, 2, 0.1)
    for step in range(bodies.STEPS):
        theirs.zero_grad()
        bodies.loss_of(reference, *bodies.batch(step)).backward()
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        nn.utils.clip_grad_norm_(parameters, 0.5)
        theirs.step()
        falling.step()
    same(bodies.state_of(engine), {n: t.detach() for n, t in reference.state_dict().items()})
    assert engine.get_lr() == pytest.approx([0.1 * 0.01, 0.05 * 0.01])


def test_half_precision_skips_and_falls(tmp_path: Path) -> None:
    cfg = bodies.config(fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1}, gradient_clipping=0.0)
    engine, *_ = isotron.initialize(bodies.net(torch.float32), cfg)
    assert engine.module.hidden.weight.dtype == torch.float16 and engine.cur_scale == 2.0**24
    bodies.run(engine, 0, 12)
    assert engine.skipped_steps > 0 and engine.cur_scale == 2.0 ** (24 - engine.skipped_steps)
    assert engine.state.updates == 12 - engine.skipped_steps and engine.global_steps == 12
    engine.save_checkpoint(tmp_path)
    cfg["fp16"] |= {"loss_scale_window": 7, "hysteresis": 3}
    again, *_ = isotron.initialize(bodies.net(torch.float32), cfg)
    again.load_checkpoint(tmp_path)
    scaler = again.scaler  # where it stood, with the options of now
    assert (scaler.scale, scaler.clean, scaler.patience) == (
        engine.cur_scale,
        engine.scaler.clean,
        engine.scaler.patience,
    )
    assert (scaler.window, scaler.hysteresis) == (7, 3)
    brain, *_ = isotron.initialize(bodies.net(torch.float32), bodies.config(bf16={"enabled": True}))
    first = bodies.run(brain, 0, 2)[0]
    for _ in range(30):
        bodies.run(brain, 0, 1)
    assert bodies.run(brain, 0, 1)[0] < first - 0.5


def test_what_is_kept_in_float32(ranks: Ranks, tmp_path: Path) -> None:
    cfg = bodies.config(bf16={"enabled": True}, zero_optimization={"stage": 3})
    weights, _ = ranks(2, bodies.mixed, cfg)[0]
    wide = {n for n, x in weights.items() if x.dtype == torch.float32}
    assert wide == {"hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "norm.running_mean",
                    "norm.running_var", "unused", "scale"}  # fmt: skip
    assert weights["embed.weight"].dtype == weights["frozen.weight"].dtype == torch.bfloat16
    exact = ranks(1, bodies.trained, bodies.config())[0]
    alone = ranks(1, bodies.mixed, {**cfg, "zero_optimization": {"stage": 0}})[0][0]
    for one in (weights, alone):  # four steps of 0.05
        assert torch.allclose(one["hidden.weight"].double(), exact[0]["hidden.weight"], atol=0.05)
    again = ranks(2, bodies.mixed, cfg, str(tmp_path))[0][0]
    assert all(torch.equal(again[n], weights[n]) for n in weights)
    with pytest.raises(Refused, match="no parameter has such a name"):
        isotron.initialize(bodies.net(torch.float32), bodies.config(bf16={"enabled": True}), keep_float32=("router*",))


@pytest.mark.slow
def test_a_model_generates_between_steps(ranks: Ranks) -> None:
    alone = ranks(1, bodies.generated, 0)[0]
    assert len(alone) == 12 and ranks(2, bodies.generated, 3) == [alone, alone]


def test_batches_data_and_the_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32) % 11, torch.arange(32) % 11)
    cfg = bodies.config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}})
    engine, _, loader, scheduler = isotron.initialize(bodies.net(), cfg, training_data=data)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert engine.gradient_accumulation_steps() == 2 and engine.zero_optimization_stage() == 0
    assert loader is not None and [len(x) for x, _ in loader] == [4] * 8
    boundaries = []
    for x, y in loader:
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(bodies.loss_of(engine, x, y))
        engine.step()
    assert boundaries == [False, True] * 4 and engine.global_steps == 4
    assert scheduler.get_last_lr() == engine.get_lr() == [pytest.approx(0.01)]
    assert engine.hidden is engine.module.hidden


class Mpu:
    """What DeepSpeed asks a unit of model parallelism."""

    def __init__(self, ways: int) -> None:
        self.ways = ways

    def get_model_parallel_world_size(self) -> int:
        return self.ways


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"config": {"train_batch_size": 1}}, "neither the config nor the call"),
        ({"config": None}, "there is no config"),
        ({"config": None, "args": Namespace(local_rank=0)}, r"args \(Namespace\) has no deepspeed_config"),
        ({"args": Namespace(deepspeed_config="ds.json")}, "with args.deepspeed_config and config"),
        ({"config_params": {}}, "with config and config_params"),
        ({"config": None, "args": Namespace(deepspeed_config=3)}, "of type int"),
        ({"model": None}, "the model is missing"),
        ({"model": Namespace()}, "each by its name"),
        ({"mpu": Mpu(2)}, "splits a model over 2"),
        ({"mesh_param": (2, 2)}, "none shares a sequence"),
        ({"distributed_port": 29501}, "torchrun --master-port"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(call: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        isotron.initialize(**{"model": bodies.net(), "config": bodies.config(), **call})


def test_the_call_as_deepspeed_users_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """args with a path or a dict, the older name, an optimizer that is made; processes that must meet first."""
    (tmp_path / "ds.json").write_text(json.dumps(bodies.config()))
    ways: list[dict[str, Any]] = [
        {"args": Namespace(deepspeed_config=str(tmp_path / "ds.json"), local_rank=0)},
        {"args": Namespace(deepspeed_config=bodies.config())},
        {"config_params": bodies.config(), "mpu": Mpu(1), "dist_init_required": True},
    ]
    for way in ways:
        model = bodies.net()
        engine, *_ = isotron.initialize(model=model, model_parameters=model.parameters(), **way)
        assert engine.train_batch_size() == 8 and engine.get_lr() == [0.05]
    made, optimizer, *_ = isotron.initialize(
        model=bodies.net(), config=bodies.config(optimizer=None), optimizer=lambda p: torch.optim.SGD(p, lr=0.5)
    )
    assert made.get_lr() == [0.5] and isinstance(optimizer, torch.optim.SGD)
    met: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.init_process_group", met.append)
    with pytest.raises(Refused, match="2 processes, and they have no process group"):
        isotron.initialize(model=bodies.net(), config=bodies.config(), dist_init_required=False)
    assert met == []
    isotron.initialize(model=bodies.net(), config=bodies.config())
    assert met == ["gloo"]


def test_tags_and_the_latest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a tag the last save, tagged or not; parts of one; nothing is said and is (None, None)."""
    cfg = bodies.config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 9}})
    engine, *_ = isotron.initialize(bodies.net(), cfg)
    assert engine.load_checkpoint(tmp_path) == (None, None) and "there is no checkpoint" in caplog.text
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    with pytest.raises(Refused, match=r"tag='gone'\)\nbut:    it holds no checkpoint"):
        engine.load_checkpoint(tmp_path, tag="gone")
    for tag, latest in (("best", True), (None, True), (7, True), ("aside", False)):
        bodies.run(engine, engine.global_steps, engine.global_steps + 1)
        engine.save_checkpoint(tmp_path, tag, {"tag": tag}, save_latest=latest)
    fresh, *_ = isotron.initialize(bodies.net(), cfg)
    path, client = fresh.load_checkpoint(tmp_path)
    assert client == {"tag": 7} and str(path).startswith(str(tmp_path / "7")) and fresh.global_steps == 3
    for tag, steps in (("best", 1), ("step_00000002", 2), ("aside", 4)):
        assert fresh.load_checkpoint(tmp_path, tag)[0] and fresh.global_steps == steps
    shutil.rmtree(tmp_path / "7")
    assert fresh.load_checkpoint(tmp_path)[1] == {"tag": None}  # the newest that is there, and that is said
    assert "holds '7'" in caplog.text
    only, *_ = isotron.initialize(bodies.net(), cfg)
    rate = only.get_lr()
    only.load_checkpoint(tmp_path, "aside", load_module_only=True)
    assert only.global_steps == only.state.updates == 0 and only.get_lr() == rate
    same(bodies.state_of(only), bodies.state_of(engine))
    only.load_checkpoint(tmp_path, "aside", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert only.global_steps == 4 and only.state.updates == 0 and only.get_lr() == rate
    for tag in ("a/b", "..", "latest", "step_00000009", ""):
        with pytest.raises(Refused, match="a tag names a directory"):
            engine.save_checkpoint(tmp_path, tag)
    with pytest.raises(Refused, match="every weight of the module"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    with pytest.raises(Refused, match="by their names"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    with pytest.raises(Refused, match="exclude_frozen_parameters"):
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(Refused, match="without a tag a checkpoint is a step"):
        engine.save_checkpoint(tmp_path, save_latest=False)


def test_what_an_engine_cannot_load_is_said_with_what_can(tmp_path: Path) -> None:
    engine, *_ = isotron.initialize(bodies.net(), bodies.config())
    saved = engine.save_checkpoint(tmp_path / "saved")
    other, *_ = isotron.initialize(nn.Sequential(nn.Linear(3, 5)), bodies.config())
    wider = bodies.net()
    name, first = next((n, p) for n, p in wider.named_parameters() if p.dim() == 2)
    first.data = torch.zeros(first.shape[0] + 1, first.shape[1])
    larger, *_ = isotron.initialize(wider, bodies.config())
    for broken, case in ((other, "the checkpoint lacks 2 of them: 0.bias, 0.weight"), (larger, f"{name} has shape")):
        with pytest.raises(Refused, match=re.escape(case)) as refused:
            broken.load_checkpoint(tmp_path / "saved")
        assert refused.value.problems[0].fix.startswith("the module that was saved there; isotron inspect")
    assert cli.main(["inspect", str(saved)]) == 0  # what the advice says
    for meta, case, fix in (({"config": {}}, "isotron train has saved it", "isotron train --load"),
                            ({}, "no engine has saved it", "save_checkpoint")):  # fmt: skip
        save_checkpoint(tmp_path / "other", 1, [], meta, SingleRank())
        with pytest.raises(Refused, match=case) as refused:
            engine.load_checkpoint(tmp_path / "other")
        assert fix in refused.value.problems[0].fix


def test_optimizers_that_are_not_known_are_refused() -> None:
    model = bodies.net()
    with pytest.raises(Refused, match="AdamW, Adam, SGD and Adafactor of torch"):
        isotron.initialize(model, bodies.config(), optimizer=torch.optim.Adagrad(model.parameters()))
    with pytest.raises(Refused, match="amsgrad=False"):
        isotron.initialize(model, bodies.config(), optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    engine, optimizer, *_ = isotron.initialize(model, bodies.config())
    with pytest.raises(Refused, match="engine.step"):
        optimizer.step()
    with pytest.raises(Refused, match="none of its parameters requires a gradient"):
        isotron.initialize(nn.Linear(2, 2).requires_grad_(False), bodies.config(), model_parameters=[torch.zeros(1)])


def test_a_module_of_two_types_keeps_them() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    engine, *_ = isotron.initialize(mixed, bodies.config(zero_optimization={"stage": 1}))
    for _ in range(2):
        engine.backward(engine.module[1](engine.module[0](torch.ones(4, 2)).double()).square().sum())
        engine.step()
    assert mixed[0].weight.dtype == torch.float32 and mixed[1].weight.dtype == torch.float64
    assert engine.global_steps == 1 and engine.get_global_grad_norm() > 0
