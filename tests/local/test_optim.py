"""AdamW against torch's, clipping against its closed form, 16-bit weights with float32 masters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isotron.core.layout import Placed, Rule, shard, whole
from isotron.core.mesh import ALONE
from isotron.core.optim.clip import clip_factor, global_norm, sum_of_squares
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.optimizer import Optimizer
from isotron.core.parallel.data import View

ONE = {"tp": 0}, {"tp": 1}


def view(weight: Tensor, grad: Tensor, decay: bool = True) -> View:
    rule = Rule("w", tuple(weight.shape), decay=decay)
    return View(Placed("w", rule, shard(rule, *ONE)), whole(weight.shape), weight.view(-1), grad.view(-1))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_equals_torch(dtype: torch.dtype, factor: float) -> None:
    shapes = ((5, 3), (7,))
    ours = [numbers(*s).to(dtype) for s in shapes]
    theirs = [torch.nn.Parameter(w.clone()) for w in ours]
    grads = [torch.zeros_like(w) for w in ours]
    cfg = OptimConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-4)
    adam = Optimizer([view(w, g, decay=w.ndim > 1) for w, g in zip(ours, grads, strict=True)], cfg)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        eps=1e-4,
    )
    for step in range(4):
        lr = 0.1 / (step + 1)
        for i, (g, p) in enumerate(zip(grads, theirs, strict=True)):
            g.copy_(numbers(*g.shape, seed=10 * step + i))
            p.grad = g.clone() * factor
        for group in reference.param_groups:
            group["lr"] = lr
        adam.step(lr, 0.3, factor)
        reference.step()
    assert adam.updates == 4
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(ours, theirs, strict=True))


def test_masters_keep_what_bfloat16_rounds_away() -> None:
    weight, grad = torch.ones(8, dtype=torch.bfloat16), torch.ones(8)
    adam = Optimizer([view(weight, grad, decay=False)], OptimConfig())
    for _ in range(20):
        adam.step(1e-4, 0.0, 1.0)
    assert torch.allclose(adam.states[0]["master"].read(), torch.full((8,), 1 - 20e-4), atol=1e-6)
    assert (weight < 1).all()  # one step alone is below half a unit in the last place


def test_wide_weights_are_their_own_masters() -> None:
    weight = torch.ones(4)
    adam = Optimizer([view(weight, torch.ones(4))], OptimConfig())
    assert adam.states[0]["master"].read().data_ptr() == weight.data_ptr()
    assert {name.split("/")[0] for name, *_ in adam.pieces()} == {"exp_avg", "exp_avg_sq"}
    narrow = Optimizer([view(weight.bfloat16(), torch.ones(4))], OptimConfig())
    assert {name for name, *_ in narrow.pieces()} == {"master/w", "exp_avg/w", "exp_avg_sq/w"}


def test_a_rank_without_parameters() -> None:
    adam = Optimizer([], OptimConfig())
    adam.step(1.0, 0.1, 1.0)
    assert adam.updates == 1 and global_norm([], ALONE) == 0


def test_the_norm_counts_what_is_owned_once() -> None:
    a, b = view(numbers(3, 2), numbers(3, 2, seed=1)), view(numbers(4), numbers(4, seed=2))
    copy = View(Placed("w", a.placed.rule, a.placed.shard, counts=False), a.box, a.weight, a.grad)
    want = math.sqrt(float(a.grad.square().sum() + b.grad.square().sum()))
    assert math.isclose(global_norm([a, copy, b], ALONE), want)
    assert math.isclose(global_norm([a, b], ALONE, scale=8.0), want / 8)
    assert global_norm([replace(v, counts=False) for v in (a, b)], ALONE) == 0
    b.grad[1] = torch.inf
    assert global_norm([a, b], ALONE) == math.inf
    b.grad[1] = torch.nan
    assert math.isnan(global_norm([a, b], ALONE))


def test_clipping() -> None:
    assert clip_factor(0.5, 1.0) == 1.0 and clip_factor(100.0, 0.0) == 1.0
    assert math.isclose(clip_factor(4.0, 1.0), 1 / (4 + 1e-6))


@pytest.mark.parametrize("size", [1, 511, 512, 3_000_001])
def test_the_norm_of_many_numbers_is_exact(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert float(sum_of_squares(x)) == pytest.approx(float(x.double().square().sum()), rel=2e-7)
    assert float(sum_of_squares(x.view(1, size).t())) == pytest.approx(float(x.double().square().sum()), rel=2e-7)
