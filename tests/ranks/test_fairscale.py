"""OSS with ShardedDDP against torch in several ranks; Pipe against the module that it cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.engine.engine import data_parallel_group
from isotron.core.engine.fairscale import OSS, FullyShardedDataParallel, Pipe, ShardedDDP
from isotron.core.errors import Refused
from tests.ranks import engine_bodies as bodies

Ranks = Callable[..., list[Any]]


def trained(kind: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Four steps of two backwards each on this rank's rows."""
    net = bodies.net()
    oss = OSS([p for p in net.parameters() if p.requires_grad], getattr(torch.optim, kind), **options)
    model, group = ShardedDDP(net, oss), data_parallel_group()
    for step in range(bodies.STEPS):
        x, y = (t.chunk(group.size)[group.index] for t in bodies.batch(step))
        oss.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (bodies.loss_of(model, a, b) / 2).backward()
        oss.step()
    return bodies.state_of(model), sum(k.nbytes() for s in oss.sharded.states for k in s.values())


@pytest.mark.parametrize(
    ("kind", "options"), [("AdamW", {"lr": 0.05, "eps": 1e-6}), ("SGD", {"lr": 0.1, "momentum": 0.9})]
)
def test_equals_torch(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    model = bodies.net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    theirs = getattr(torch.optim, kind)(parameters, **options)
    for step in range(bodies.STEPS):
        theirs.zero_grad()
        bodies.loss_of(model, *bodies.batch(step)).backward()
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        theirs.step()
    alone, shared = ranks(1, trained, kind, options)[0], ranks(2, trained, kind, options)
    for weights, _ in (alone, *shared):
        for name, tensor in model.state_dict().items():
            assert torch.allclose(weights[name], tensor, rtol=1e-9, atol=1e-12), name
    assert sum(size for _, size in shared) == alone[1] and all(size < 0.8 * alone[1] for _, size in shared)


def fully(options: dict[str, Any]) -> tuple[dict[str, Tensor], int, float]:
    """Four clipped steps of two backwards each; what a spoiled backward leaves is thrown away between them."""
    model, group = FullyShardedDataParallel(bodies.net(), **options), data_parallel_group()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-6)
    for step in range(bodies.STEPS):
        x, y = (t.chunk(group.size)[group.index] for t in bodies.batch(step))
        (1e3 * bodies.loss_of(model, x, y)).backward()
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (bodies.loss_of(model, a, b) / 2).backward()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
    model.close()
    return model.state_dict(), sum(p.numel() for p in model.parameters()), norm


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"move_params_to_cpu": True}])
def test_fully_sharded_equals_torch(ranks: Ranks, options: dict[str, Any]) -> None:
    model = bodies.net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(parameters, lr=0.05, eps=1e-6)
    for step in range(bodies.STEPS):
        theirs.zero_grad()
        bodies.loss_of(model, *bodies.batch(step)).backward()
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = float(nn.utils.clip_grad_norm_(parameters, 0.5))
        theirs.step()
    found = ranks(2, fully, options)
    assert sum(size for _, size, _ in found) == sum(p.numel() for p in parameters)
    for weights, _, theirs_norm in found:
        assert theirs_norm == pytest.approx(norm, rel=1e-9)
        for name, tensor in model.state_dict().items():
            assert torch.allclose(weights[name], tensor, rtol=1e-6, atol=1e-7), name


def test_fully_sharded_in_half_precision_and_nested() -> None:
    wrapped = FullyShardedDataParallel(bodies.net(torch.float32), compute_dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in wrapped.parameters())
    assert wrapped.module.hidden.weight.dtype == torch.bfloat16
    with pytest.raises(Refused, match="wrap the whole model once"):
        FullyShardedDataParallel(nn.Sequential(wrapped))
    wrapped.close()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_pipe_is_its_module(checkpoint: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6).double() for _ in range(4)]
    plain, x = nn.Sequential(*layers), torch.randn(10, 6, dtype=torch.float64)
    plain(x).square().sum().backward()
    wanted = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    calls: list[int] = []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    pipe = Pipe(plain, balance=[1, 2, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    pipe(x).square().sum().backward()
    assert all(torch.allclose(p.grad, w, rtol=1e-12) for p, w in zip(pipe.parameters(), wanted, strict=True))
    assert len(calls) == {"always": 6, "except_last": 5, "never": 3}[checkpoint]
    assert [len(stage) for stage in pipe.partitions] == [1, 2, 1]


def test_shapes_that_cannot_be_are_refused() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(Refused, match="the module has 2"):
        Pipe(layers, balance=[1, 2])
    with pytest.raises(Refused, match="always, except_last, never"):
        Pipe(layers, balance=[1, 1], checkpoint="sometimes")
    with pytest.raises(Refused, match="2 stages"):
        Pipe(layers, balance=[1, 1], devices=["cpu"])
    with pytest.raises(Refused, match="no module yet"):
        OSS(layers.parameters(), torch.optim.SGD, lr=0.1).step()
