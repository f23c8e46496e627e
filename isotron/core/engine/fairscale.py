"""FairScale's call shapes on the core: OSS, ShardedDDP, FullyShardedDataParallel, Pipe.

OSS keeps optimizer state sharded, ShardedDDP reduces each gradient to the rank that steps it; together they are an
engine with stage 2, driven by `loss.backward()` and `optimizer.step()`. Pipe is GPipe in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint as recomputed

from isotron.core.engine.engine import data_parallel_group
from isotron.core.engine.held import Held
from isotron.core.engine.rules import from_torch, settings
from isotron.core.errors import refuse
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.optimizer import Optimizer

BUCKET = 2**23


class OSS(torch.optim.Optimizer):
    """An optimizer of torch (AdamW, Adam, SGD) whose state is sharded over the ranks. Steps after ShardedDDP has it."""

    def __init__(
        self, params: Iterable[Any], optim: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
    ) -> None:
        plain = optim(params, **options)  # type: ignore[call-arg]
        super().__init__(plain.param_groups, plain.defaults)
        self.rule, self.cfg = from_torch(plain, OptimConfig(clip_grad=0.0))
        self.held: Held | None = None
        self.sharded: Optimizer | None = None

    def attach(self, held: Held) -> None:
        """Take over a module's parameters."""
        self.held = held
        self.sharded = Optimizer(held.views(), self.cfg, self._settings(held), held.group)

    def _settings(self, held: Held) -> dict[str, Any]:
        return settings(self.param_groups, held.parameters, self.rule, self.rule)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gradients are summed at their owners, stepped there, and weights are sent to all ranks."""
        if self.held is None or self.sharded is None:
            raise refuse("OSS.step()", "it has no module yet", "model = ShardedDDP(module, oss)")
        self.held.finish()
        self.sharded.settings = self._settings(self.held)
        self.sharded.step(1.0, 1.0, 1.0)
        self.held.send()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A step begins with empty buffers."""
        if self.held is not None:
            self.held.forget()


class ShardedDDP(nn.Module):
    """`module` with its gradients reduced to their owners: the mean over the ranks, as DistributedDataParallel has it.

    Backwards between two steps add up; under `no_sync` all but the last.
    """

    def __init__(self, module: nn.Module, sharded_optimizer: OSS, reduce_buffer_size: int = BUCKET) -> None:
        super().__init__()
        group = data_parallel_group()
        self.module, self.ways = module, group.size
        self.held = Held(module, None, 2, group, reduce_buffer_size)
        sharded_optimizer.attach(self.held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; tensors in it carry the mean over ranks into the backward."""
        return _shared(self.module(*args, **kwargs), self.ways)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to switch off: what is summed at its owner may be summed in parts."""
        return nullcontext()


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ways: int) -> Tensor:
        ctx.ways = ways
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx / ctx.ways, None


def _shared(out: Any, ways: int) -> Any:
    """Every tensor of a nested output whose gradient is divided by the number of ranks."""
    if isinstance(out, Tensor):
        return _Mean.apply(out, ways) if ways > 1 and out.requires_grad else out
    if isinstance(out, (list, tuple)) and type(out) in (list, tuple):
        return type(out)(_shared(x, ways) for x in out)
    if isinstance(out, dict):
        for key, value in out.items():
            out[key] = _shared(value, ways)
    return out


class FullyShardedDataParallel(nn.Module):
    """`module` with weights, gradients and optimizer state sharded; the optimizer is made over `parameters()` after it.

    reshard_after_forward: weights are gathered for every use, else they stay and the rest is sharded. compute_dtype
    (with mixed_precision, float16 unless given): of the module, whose masters are then float32 in the optimizer.
    move_params_to_cpu: own weights live in host memory. Members of each ModuleList are gathered one by one, so only
    the outermost module is wrapped. Gradients are means over ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        mixed_precision: bool = False,
        compute_dtype: torch.dtype | None = None,
        move_params_to_cpu: bool = False,
    ) -> None:
        super().__init__()
        if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
            case = "what is gathered at a time follows from the ModuleLists of the outermost module"
            raise refuse("FullyShardedDataParallel inside another", case, "wrap the whole model once")
        dtype = compute_dtype or (torch.float16 if mixed_precision else None)
        self.module, group = module, data_parallel_group()
        zero = 3 if reshard_after_forward else 2
        self.held = Held(module, dtype, zero, group, BUCKET, hosted=move_params_to_cpu)
        self._parts = self.held.sharded.parts()
        mine = {id(p) for p in self._parts}
        # the optimizer comes later: torch tells of a step of any optimizer, and we look whether it has our parts
        self._hooks = [
            register_optimizer_step_pre_hook(lambda o, *_: self._before_step() if _steps(o, mine) else None),
            register_optimizer_step_post_hook(lambda o, *_: self.held.sharded.stepped() if _steps(o, mine) else None),
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. Gradients that `optimizer.zero_grad()` took away are forgotten here too."""
        if torch.is_grad_enabled():
            self._follow_zero_grad()
            for part in self._parts:  # a mark: whoever wants a new start takes it away
                part.grad = part.new_zeros(()).expand_as(part) if part.grad is None else part.grad
        return self.module(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parts that this rank steps."""
        return iter(self._parts)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before."""
        return self.held.sharded.clip_grad_norm_(max_norm)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole module's, on every rank."""
        with self.held.sharded.gathered() as module:
            return {n: x.detach().clone() for n, x in module.state_dict(*args, **kwargs).items()}

    def summon_full_params(self) -> AbstractContextManager[nn.Module]:
        """The module with whole weights, to read."""
        return self.held.sharded.gathered()

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to switch off: what is summed at its owner may be summed in parts."""
        return nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A step begins with empty buffers."""
        self.held.forget()

    def close(self) -> None:
        """No longer look at what torch's optimizers do."""
        for hook in self._hooks:
            hook.remove()

    def _follow_zero_grad(self) -> None:
        if all(part.grad is None for part in self._parts):
            self.held.forget()

    def _before_step(self) -> None:
        self._follow_zero_grad()
        self.held.finish()


def _steps(optimizer: torch.optim.Optimizer, mine: set[int]) -> bool:
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


class Pipe(nn.Module):
    """A sequential module cut into stages by `balance` (layers of each), run on microbatches one after the other.

    `devices`: of the stages; none means where the module is. `checkpoint`: whose activations are computed again.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[Any] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
    ) -> None:
        super().__init__()
        if sum(balance) != len(module) or min(balance, default=0) < 1:
            case = f"every layer belongs to one stage, and the module has {len(module)}"
            raise refuse(f"Pipe(balance={list(balance)})", case, f"balance=[{len(module)}]")
        if chunks < 1 or checkpoint not in ("always", "except_last", "never"):
            case = "chunks is 1 or more, checkpoint one of always, except_last, never"
            raise refuse(f"Pipe(chunks={chunks}, checkpoint={checkpoint!r})", case, "chunks=4")
        if devices is not None and len(devices) < len(balance):
            raise refuse(f"Pipe with {len(devices)} devices", f"there are {len(balance)} stages", "a device for each")
        ends = list(accumulate(balance))
        self.chunks, self.checkpoint, self.balance = chunks, checkpoint, list(balance)
        self.devices = None if devices is None else [torch.device(d) for d in devices]
        self.partitions = nn.ModuleList(module[end - n : end] for n, end in zip(balance, ends, strict=True))
        for stage, device in zip(self.partitions, self.devices or (), strict=False):
            stage.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the whole batch; its first dimension is cut into chunks."""
        parts = list(x.chunk(self.chunks))
        # in the order of a pipeline's clock: stage s works on chunk i at time s + i
        for tick in range(len(parts) + len(self.partitions) - 1):
            for i in range(len(parts)):
                if 0 <= tick - i < len(self.partitions):
                    parts[i] = self._stage(tick - i, parts[i], i == len(parts) - 1)
        return torch.cat(parts)

    def _stage(self, number: int, x: Tensor, last: bool) -> Tensor:
        x = x if self.devices is None else x.to(self.devices[number])
        again = self.checkpoint == "always" or (self.checkpoint == "except_last" and not last)
        if again and self.training:
            return recomputed(self.partitions[number], x, use_reentrant=False)
        return self.partitions[number](x)
