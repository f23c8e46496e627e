"""`isotron.initialize`: an engine from DeepSpeed's call, with every keyword that `deepspeed.initialize` has.

What has a meaning here works; the rest is refused by its name: a script that comes from DeepSpeed never trains
something else than it asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from isotron.core import device as devices
from isotron.core.engine.config import EngineConfig, read
from isotron.core.engine.engine import Engine, Scheduler, data_parallel_group
from isotron.core.engine.rates import rate
from isotron.core.engine.rules import from_config, from_torch
from isotron.core.errors import Problem, Refused, refuse

Config = Mapping[str, Any] | str | Path


def initialize(
    model: nn.Module | None = None,
    config: Config | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    keep_float32: Sequence[str] = (),
    *,
    args: Any = None,
    config_params: Config | None = None,
    dist_init_required: bool | None = None,
    mpu: Any = None,
    mesh_param: Any = None,
    distributed_port: int | None = None,
) -> tuple[Engine, torch.optim.Optimizer, DataLoader[Any] | None, Any]:
    """(engine, optimizer, loader, scheduler) for a module and DeepSpeed's JSON, a dict or the path of a file.

    `args.deepspeed_config` or `config_params` may stand for `config`. `optimizer`: one of torch, or a function that
    makes one of parameters. `model_parameters`: the parameters, or groups of torch with `lr` and `weight_decay`, that
    the optimizer trains. `lr_scheduler`: one on `optimizer`, or a function that makes one of an optimizer.
    `keep_float32`: patterns of names of parameters and buffers that fp16 and bf16 do not cast, with the modules that
    they belong to. `dist_init_required`: False leaves the process group to the caller; else a process that a launcher
    started joins the others.
    """
    model = accepted(model, mpu, mesh_param, distributed_port)
    source = chosen_config(args, config, config_params)
    join(dist_init_required, next((p.device for p in model.parameters()), torch.get_default_device()))
    cfg = read(source, data_parallel_group().size)
    trained = [p for p in model.parameters() if p.requires_grad] if model_parameters is None else list(model_parameters)
    if optimizer is None:
        optimizer, rule, optim = from_config(cfg, trained)
    else:
        optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(trained)
        rule, optim = from_torch(optimizer, cfg.optim)
    engine = Engine(model, cfg, optimizer, rule, optim, keep_float32)
    engine.lr_scheduler = _scheduler(cfg, optimizer, lr_scheduler)
    return engine, optimizer, _loader(engine, training_data, collate_fn), engine.lr_scheduler


def accepted(model: Any, mpu: Any, mesh_param: Any, distributed_port: Any) -> nn.Module:
    """The module; refuses what DeepSpeed's call can ask for and an engine cannot do, all of it at once."""
    found = []
    if not isinstance(model, nn.Module):
        case = f"the model is {'missing' if model is None else 'of type ' + type(model).__name__}"
        found.append(Problem("initialize(...)", case, "initialize(model=net, config=...), each by its name"))
    if mpu is not None and _ways(mpu) != 1:
        case = f"every rank of an engine is a data-parallel rank, this one splits a model over {_ways(mpu)}"
        found.append(Problem("initialize(mpu=...)", case, "a model of isotron's with --tp, or leave mpu out"))
    if mesh_param is not None:
        case = "every rank of an engine is a data-parallel rank, none shares a sequence with others"
        fix = "a model of isotron's with --cp, or leave mesh_param out"
        found.append(Problem(f"initialize(mesh_param={mesh_param!r})", case, fix))
    if distributed_port is not None:
        case, fix = "the launcher names the port at which ranks meet", "torchrun --master-port, and leave it out"
        found.append(Problem(f"initialize(distributed_port={distributed_port})", case, fix))
    if found:
        raise Refused(found)
    return model  # type: ignore[no-any-return]


def _ways(mpu: Any) -> int:
    return int(mpu.get_model_parallel_world_size())


def chosen_config(args: Any, config: Config | None, config_params: Config | None) -> Config:
    """The one config that was given: by its name, by its old name, or as `args.deepspeed_config`."""
    by_args = getattr(args, "deepspeed_config", None)
    ways = {"args.deepspeed_config": by_args, "config": config, "config_params": config_params}
    ways["args.deepscale_config"] = getattr(args, "deepscale_config", None)
    given = {name: value for name, value in ways.items() if value is not None}
    fix = 'initialize(model=net, config="ds.json"), a dict, or args with a deepspeed_config'
    if not given:
        case = "there is no config" if args is None else f"args ({type(args).__name__}) has no deepspeed_config"
        raise refuse("initialize(...)", case, fix)
    if len(given) > 1:
        raise refuse(f"initialize with {' and '.join(given)}", "an engine has one config", fix)
    ((name, value),) = given.items()
    if not isinstance(value, (Mapping, str, Path)):
        raise refuse(f"{name} of type {type(value).__name__}", "a config is a dict or the path of a JSON file", fix)
    return value


def join(required: bool | None, device: torch.device) -> None:
    """Join the processes that a launcher started, as DeepSpeed does; a world of one needs nothing.

    Without it each process of torchrun would train alone, on all of the data, and nobody would notice.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or not dist.is_available() or dist.is_initialized():
        return
    if required is False:
        case = f"the launcher started {size} processes, and they have no process group"
        fix = "torch.distributed.init_process_group() before it, or leave dist_init_required out"
        raise refuse("initialize(dist_init_required=False)", case, fix)
    dist.init_process_group(devices.backend(device))


def _scheduler(cfg: EngineConfig, optimizer: torch.optim.Optimizer, given: Any) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if cfg.scheduler is None:
        return None
    return Scheduler(rate(cfg.scheduler, cfg.scheduler_params, cfg.lr), optimizer)


def _loader(engine: Engine, data: Dataset[Any] | None, collate: Any) -> DataLoader[Any] | None:
    if data is None:
        return None
    sampler: Any = DistributedSampler(data, engine.group.size, engine.group.index, shuffle=True, drop_last=True)
    return DataLoader(data, engine.cfg.micro_batch, sampler=sampler, collate_fn=collate, drop_last=True)
