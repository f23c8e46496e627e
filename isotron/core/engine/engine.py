"""DeepSpeed's way of working on the core: `engine(x)`, `engine.backward(loss)`, `engine.step()`, for any module.

engine, optimizer, loader, scheduler = isotron.initialize(model=net, config={"train_batch_size": 8, ...})

A step is `accumulation` forwards and backwards of one micro batch per data-parallel rank; its gradient is that of the
mean of all their losses. Every rank of the default process group is a data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from isotron.core import device as devices
from isotron.core.engine import files
from isotron.core.engine.config import EngineConfig
from isotron.core.engine.held import Held
from isotron.core.engine.rules import settings
from isotron.core.mesh import Group, Mesh
from isotron.core.optim.clip import clip_factor, global_norm
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.optimizer import Optimizer
from isotron.core.precision.scaler import LossScaler


class Scheduler:
    """A schedule of DeepSpeed's by its name: sets the rate of every group; `step` counts updates."""

    def __init__(self, at: Callable[[int], float], optimizer: torch.optim.Optimizer) -> None:
        self.at, self.optimizer, self.updates = at, optimizer, 0
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.at(self.updates)

    def step(self) -> None:
        """One update was applied."""
        self.updates += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """The rates of the groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The number of updates."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a number of updates."""
        self.updates = int(state["updates"])
        self._set()


class Engine:
    """A module that trains sharded. `module` stays usable as it is; calling the engine calls it."""

    def __init__(
        self,
        module: nn.Module,
        cfg: EngineConfig,
        optimizer: torch.optim.Optimizer,
        rule: str,
        optim: OptimConfig,
        keep_float32: Sequence[str] = (),
    ) -> None:
        self.cfg, self.group = cfg, data_parallel_group()
        self.optimizer, self._rule = optimizer, rule
        dtype = devices.dtype_of(cfg.dtype) if cfg.dtype else None
        travel = devices.dtype_of(cfg.reduce_dtype) if cfg.reduce_dtype else None
        sums = devices.dtype_of(cfg.sum_dtype) if cfg.sum_dtype else None
        away = {"hosted": cfg.offload.weights, "files": cfg.offload.weights_directory}
        options = {**away, "reduce_dtype": travel, "grad_dtype": sums}
        self.held = Held(module, dtype, cfg.zero, self.group, cfg.bucket_size, keep_float32, **options)
        wide = torch.empty(0, dtype=torch.promote_types(self.held.dtype, torch.float32), device=self.held.device)
        self.state = Optimizer(self.held.views(), optim, self._settings(), self.group, wide, cfg.offload)
        self.scaler = LossScaler.for_run(cfg.dtype, optim)
        self.lr_scheduler: Any = None
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.norm = 0.0

    @property
    def module(self) -> nn.Module:
        """The module that trains."""
        return self.held.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "held":
            raise AttributeError(name)
        return getattr(self.held.module, name)

    def _settings(self) -> dict[str, Any]:
        return settings(self.optimizer.param_groups, self.held.parameters, self._rule, self.cfg.optim.muon_others)

    # ---- one step --------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next or current micro batch is the last of its step."""
        return self.micro_steps % self.cfg.accumulation == self.cfg.accumulation - 1

    def backward(self, loss: Tensor) -> Tensor:
        """Gradients of one micro batch; the loss is scaled for the mean over micro batches and ranks."""
        weight = self.scaler.scale / (self.cfg.accumulation * self.group.size)
        wide = torch.promote_types(loss.dtype, torch.float32)  # a loss scale is beyond float16
        self.held.backward(loss.to(wide) * weight, self.is_gradient_accumulation_boundary())
        return loss

    def step(self) -> None:
        """After the last micro batch: norm, clipping, update; skipped on all ranks when a gradient is not finite."""
        last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not last:
            return
        self.held.finish()
        self.norm = global_norm(self.state.views, self.group, self.scaler.scale, self.held.device)
        overflow = not math.isfinite(self.norm)
        if overflow:
            self.skipped_steps += 1
            self.held.forget()
        else:
            self.state.settings = self._settings()
            self.state.step(1.0, 1.0, clip_factor(self.norm, self.state.cfg.clip_grad) / self.scaler.scale)
            self.held.send()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.scaler.update(overflow)
        self.global_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: a step begins with empty buffers."""

    # ---- facts -----------------------------------------------------------------------------------------------------

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward and rank."""
        return self.cfg.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Forwards per step."""
        return self.cfg.accumulation

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.cfg.global_batch

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.cfg.zero

    def get_lr(self) -> list[float]:
        """The rate of every group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        """Of the last step, before clipping."""
        return self.norm

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """The module with all its weights at hand (stage 3), for `state_dict()`; changes to them are lost."""
        return self.held.sharded.gathered()

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.scaler.scale

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self.held.device

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Save weights, masters, moments and counters; every rank calls it. A `tag` is a directory of its own.

        `save_latest`: it is what `load_checkpoint` without a tag takes.
        """
        files.refuse_parts(exclude_frozen_parameters=exclude_frozen_parameters)
        return files.save(self, Path(save_dir), tag, dict(client_state or {}), save_latest)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of any number of ranks and stage: (its path, client state).

        Without a tag from the one that was saved last; (None, None) and a warning where there is none. Weights come
        with their masters; `load_module_only` leaves moments, rates and counters as they are.
        """
        files.refuse_parts(not_strict=not load_module_strict, custom_load_fn=custom_load_fn)
        wanted = files.Parts(load_optimizer_states, load_lr_scheduler_states, True)
        return files.load(self, Path(load_dir), tag, files.Parts() if load_module_only else wanted)


def data_parallel_group() -> Group:
    """All ranks of the default process group; this one alone without it."""
    world = dist.is_available() and dist.is_initialized()
    return Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp") if world else Mesh().group("dp")
