"""Every update rule against torch's or a plain reference; states kept in fewer bits; settings by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.errors import Refused
from isotron.core.layout import Box, Part, Placed, Rule, Split, shard, whole
from isotron.core.mesh import ALONE
from isotron.core.optim.adafactor import without
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.groups import settle
from isotron.core.optim.kept import Blocks, Remainder, Rounded, zeros_on
from isotron.core.optim.matrices import deal, parts, rounds
from isotron.core.optim.muon import Muon
from isotron.core.optim.newton_schulz import length, orthogonalised
from isotron.core.optim.optimizer import Optimizer
from isotron.core.parallel.data import View

ONE = {"tp": 0}, {"tp": 1}
ADAM: dict[str, Any] = {"adam_beta1": 0.8, "adam_eps": 1e-4}
SHAPES = {
    "layers.0.a.weight": (6, 4),
    "layers.0.b.weight": (3, 5),
    "layers.0.norm.weight": (4,),
    "embed.weight": (9, 4),
}


def view(name: str, weight: Tensor, grad: Tensor, split: Split | None = None) -> View:
    rule = Rule(name, tuple(weight.shape), split, decay=weight.ndim > 1)
    return View(Placed(name, rule, shard(rule, *ONE)), whole(weight.shape), weight.view(-1), grad.view(-1))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def trained(
    cfg: OptimConfig, dtype: torch.dtype = torch.float64, steps: int = 4
) -> tuple[dict[str, Tensor], Optimizer]:
    """Weights after steps with gradients counted half and a learning rate that falls."""
    weights = {n: numbers(*s).to(dtype) for n, s in SHAPES.items()}
    grads = {n: torch.zeros(s, dtype=torch.promote_types(dtype, torch.float32)) for n, s in SHAPES.items()}
    ours = Optimizer([view(n, weights[n], grads[n]) for n in SHAPES], cfg)
    for step in range(steps):
        for n, g in grads.items():
            g.copy_(numbers(*SHAPES[n], seed=10 * step + 1))
        ours.step(0.1 / (step + 1), 0.3, 0.5)
    return weights, ours


def by_torch(make: Callable[[list[Any]], torch.optim.Optimizer], steps: int = 4) -> dict[str, Tensor]:
    weights = {n: torch.nn.Parameter(numbers(*s)) for n, s in SHAPES.items()}
    groups = [{"params": [w], "weight_decay": 0.3 if w.ndim > 1 else 0.0} for w in weights.values()]
    theirs = make(groups)
    for step in range(steps):
        for n, w in weights.items():
            w.grad = numbers(*SHAPES[n], seed=10 * step + 1) * 0.5
        for group in theirs.param_groups:
            group["lr"] = 0.1 / (step + 1)
        theirs.step()
    return {n: w.detach() for n, w in weights.items()}


@pytest.mark.parametrize(
    ("cfg", "make"),
    [
        (OptimConfig("adamw", **ADAM), lambda g: torch.optim.AdamW(g, betas=(0.8, 0.95), eps=1e-4)),
        (OptimConfig("adam_l2", **ADAM), lambda g: torch.optim.Adam(g, betas=(0.8, 0.95), eps=1e-4)),
        (OptimConfig("sgd", sgd_momentum=0.7), lambda g: torch.optim.SGD(g, lr=1.0, momentum=0.7)),
        (OptimConfig("sgd", sgd_momentum=0.0), lambda g: torch.optim.SGD(g, lr=1.0)),
        (OptimConfig("adafactor"), lambda g: torch.optim.Adafactor(g, lr=1.0)),
        (
            OptimConfig("adafactor", adafactor_decay=0.6, adafactor_clip=1.5, adafactor_eps=0.1,
                        adafactor_min_rms=2.0),
            lambda g: torch.optim.Adafactor(g, lr=1.0, beta2_decay=-0.6, d=1.5, eps=(0.1, 2.0)),
        ),
    ],
)  # fmt: skip
def test_as_torch(cfg: OptimConfig, make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
    ours, theirs = trained(cfg)[0], by_torch(make)
    assert all(torch.allclose(ours[n], theirs[n], rtol=1e-12, atol=1e-12) for n in SHAPES)


def test_lion_as_in_its_paper() -> None:
    ours, _ = trained(OptimConfig("lion", lion_beta1=0.9, lion_beta2=0.97))
    for n, shape in SHAPES.items():
        w, m = numbers(*shape), torch.zeros(shape, dtype=torch.float64)
        for step in range(4):
            g, lr = 0.5 * numbers(*shape, seed=10 * step + 1), 0.1 / (step + 1)
            w = w - lr * ((0.9 * m + 0.1 * g).sign() + (0.3 if w.ndim > 1 else 0.0) * w)
            m = 0.97 * m + 0.03 * g
        assert torch.allclose(ours[n], w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_as_written_down(nesterov: bool) -> None:
    ours, _ = trained(OptimConfig("muon", muon_momentum=0.8, muon_nesterov=nesterov, muon_extra_scale_factor=0.5))
    adamw, _ = trained(OptimConfig("adamw"))
    for n, shape in SHAPES.items():
        if not n.startswith("layers") or len(shape) != 2:
            assert torch.equal(ours[n], adamw[n])
            continue
        w, m = numbers(*shape), torch.zeros(shape, dtype=torch.float64)
        for step in range(4):
            g, lr = 0.5 * numbers(*shape, seed=10 * step + 1), 0.1 / (step + 1)
            m = 0.8 * m + 0.2 * g
            o = orthogonalised(0.2 * g + 0.8 * m if nesterov else m, 5)
            w = w * (1 - lr * 0.3) - lr * 0.5 * max(shape) ** 0.5 * o
        assert torch.allclose(ours[n], w, rtol=1e-12, atol=1e-12)


def test_newton_schulz_against_the_singular_values_and_torch() -> None:
    for shape in ((8, 20), (20, 8), (8, 8)):
        x = numbers(*shape)
        o = orthogonalised(x, 5)
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        inside = u.t() @ o @ v.t()  # the iteration is a polynomial in the singular values
        assert torch.allclose(inside, inside.diag().diag(), atol=1e-10)
        assert ((inside.diag() > 0.6) & (inside.diag() < 1.3)).all() or float(s[-1] / s[0]) < 0.05
    if not hasattr(torch.optim, "Muon"):
        return
    weight = torch.nn.Parameter(numbers(12, 7).float())
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.0, momentum=0.9)
    mine, grad = weight.detach().clone(), numbers(12, 7, seed=3).float()
    cfg = OptimConfig("muon", muon_momentum=0.9, muon_scale_mode="shape_scaling", muon_extra_scale_factor=1.0)
    ours = Optimizer([view("layers.0.w", mine, grad.clone())], cfg)
    weight.grad = grad
    theirs.step()
    ours.step(0.1, 0.0, 1.0)
    assert torch.allclose(mine, weight.detach(), atol=0.1 * 0.05)  # torch iterates in bfloat16


def test_lengths_of_updates() -> None:
    assert length("spectral", 4, 9) == 3 and length("unit_rms_norm", 16, 4) == 2
    assert length("shape_scaling", 4, 9) == 1 and length("shape_scaling", 16, 4) == 2


def test_fused_parts_are_matrices_of_their_own() -> None:
    weight, grad = torch.zeros(10, 4, dtype=torch.float64), numbers(10, 4)
    split = Split(0, (Part(2, 3), Part(1, 4)))
    ours = Optimizer([view("layers.0.qkv.weight", weight, grad.clone(), split)], OptimConfig("muon"))
    ours.step(1.0, 0.0, 1.0)
    for rows in (slice(0, 6), slice(6, 10)):
        wanted = -0.2 * length("spectral", *grad[rows].shape) * orthogonalised(grad[rows], 5)
        assert torch.allclose(weight[rows], wanted, rtol=1e-12, atol=1e-12)


def test_experts_and_their_parts_are_matrices_of_their_own() -> None:
    """Two experts, of gate and up (rows), and of a matrix whose columns are split: by muon and by adafactor."""
    tall = Rule("layers.0.up", (12, 4), Split(0, (Part(3), Part(3)) * 2), experts=2)
    flat = Rule("layers.0.down", (10, 6), Split(1, (Part(6),)), experts=2)
    assert parts(tall) == [Box((at, 0), (3, 4)) for at in (0, 3, 6, 9)]
    assert parts(flat) == [Box((0, 0), (5, 6)), Box((5, 0), (5, 6))]
    for method in ("muon", "adafactor"):
        for rule in (tall, flat):
            weight, grad = numbers(*rule.shape, seed=4), numbers(*rule.shape)
            of = View(Placed(rule.pattern, rule, shard(rule, *ONE)), whole(rule.shape), weight.view(-1), grad.view(-1))
            ours = Optimizer([of], OptimConfig(method))
            wanted = weight.clone()
            for box in parts(rule):
                part = torch.nn.Parameter(weight[box.slices()].clone())
                part.grad = grad[box.slices()].clone()
                if method == "adafactor":
                    torch.optim.Adafactor([part], lr=0.5).step()
                else:
                    alone = View(Placed("layers.0.w", Rule("", box.shape), shard(Rule("", box.shape), *ONE)),
                                 whole(box.shape), part.data.view(-1), part.grad.view(-1))  # fmt: skip
                    Optimizer([alone], OptimConfig("muon")).step(0.5, 0.0, 1.0)
                wanted[box.slices()] = part.detach()
            ours.step(0.5, 0.0, 1.0)
            assert torch.allclose(weight, wanted, rtol=1e-12, atol=1e-12)


def test_means_of_rows_and_columns_are_kept_of_every_part() -> None:
    weight, split = numbers(10, 4), Split(0, (Part(2, 3), Part(1, 4)))
    ours = Optimizer([view("layers.0.qkv.weight", weight, numbers(10, 4), split)], OptimConfig("adafactor"))
    kept = {name.split("/")[0]: (shape, pieces) for name, shape, _, pieces in ours.pieces()}
    assert {k: (shape, [b.shape for b, _ in found]) for k, (shape, found) in kept.items()} == {
        "exp_avg_sq_row": ((10,), [(6,), (4,)]), "exp_avg_sq_col": ((2, 4), [(1, 4), (1, 4)])
    }  # fmt: skip
    assert ours.nbytes() == 8 * (10 + 8) and without(-1, (6, 4), [Box((0, 0), (6, 1)), Box((0, 1), (6, 3))]) == (
        (2, 6), [Box((0, 0), (1, 6)), Box((1, 0), (1, 6))]
    )  # fmt: skip


def test_matrices_are_dealt_by_work_and_taken_in_rounds() -> None:
    shapes = {"a": (8, 8), "b": (4, 8), "c": (4, 8), "d": (8, 8)}
    held = [{n: [Box((0, 0), (s[0] // 2, s[1]))] for n, s in shapes.items()},
            {n: [Box((s[0] // 2, 0), (s[0] // 2, s[1]))] for n, s in shapes.items()}]  # fmt: skip
    dealt = deal({n: parts(Rule(n, s)) for n, s in shapes.items()}, held)
    assert [(m.name, m.owner) for m in dealt] == [("a", 0), ("d", 1), ("b", 0), ("c", 1)]
    assert [[m.name for m in r] for r in rounds(dealt, 2, 64)] == [["a", "d"], ["b", "c"]]
    assert len(rounds(dealt, 2, 1000)) == 1 and len(rounds(dealt, 2, 1)) == 2
    with pytest.raises(RuntimeError, match="do not make up"):
        deal({"a": [whole((8, 8))]}, held[:1])


def test_rounds_change_no_bit() -> None:
    results = []
    for budget in (1, 10_000):
        weights = {n: numbers(6, 4, seed=i) for i, n in enumerate(("layers.0.a", "layers.0.b"))}
        views = [view(n, w, numbers(6, 4, seed=9)) for n, w in weights.items()]
        ours = Optimizer(views, OptimConfig("muon"))
        ours.methods["muon"] = Muon(ours.cfg, views, ALONE, torch.empty(0), budget)
        ours.step(0.1, 0.0, 1.0)
        results.append(weights)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


# ---- states in fewer bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_states_stay_close(method: str, dtype: str) -> None:
    wide, plain = trained(OptimConfig(method), torch.float32, 20)
    near, narrow = trained(OptimConfig(method, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype), torch.float32, 20)
    for n in SHAPES:
        start = numbers(*SHAPES[n]).float()
        moved = float((wide[n] - start).norm())
        assert 0 < float((near[n] - wide[n]).norm()) < 0.1 * moved or (dtype == "int8" and len(SHAPES[n]) < 2)
    assert narrow.nbytes() < 0.6 * plain.nbytes() or dtype == "int8"  # a block is at least a row, and rows are short


def test_a_second_moment_in_bfloat16_falls_with_0_999() -> None:
    weight, grad = torch.ones(64), torch.ones(64)
    cfg = OptimConfig(adam_beta2=0.999, exp_avg_sq_dtype="bfloat16")
    ours = Optimizer([view("w", weight, grad)], cfg)
    ours.step(0.0, 0.0, 30.0)
    first = float(ours.states[0]["exp_avg_sq"].read()[0])
    grad.fill_(0.0)
    for _ in range(1000):
        ours.step(0.0, 0.0, 1.0)
    left = ours.states[0]["exp_avg_sq"].read() / first
    assert torch.allclose(left, torch.full((64,), 0.999**1000), rtol=0.05)


def test_blocks_forget_no_small_number_and_are_stable() -> None:
    x = numbers(3, 300).float() * torch.logspace(-6, 2, 300)
    for signed in (True, False):
        blocks = Blocks((3, 300), torch.float32, zeros_on(x.device), signed)
        values = x if signed else x.square()
        blocks.write(values.view(-1))
        read = blocks.read().view(3, 300)
        assert ((read == 0) == (values == 0)).all() and (read.sign() == values.sign()).all()
        large = values.abs() > 0.05 * values.abs().amax(-1, keepdim=True)
        assert ((read - values).abs()[large] <= 0.05 * values.abs()[large]).all()
        blocks.write(read.reshape(-1))
        assert torch.equal(blocks.read().view(3, 300), read)
        assert blocks.nbytes() == 3 * 300 + 4 * 3 * 3


def test_rounding_turns() -> None:
    rounded = Rounded(torch.zeros(1, dtype=torch.bfloat16), torch.float32)
    x = torch.full((1,), 1 + 2**-10)  # an eighth of a bfloat16 step above one
    total = 0.0
    for turn in range(1000):
        rounded.write(x, turn)
        total += float(rounded.read())
    assert total / 1000 == pytest.approx(1 + 2**-10, abs=2e-5)
    rounded.write(x)
    assert float(rounded.read()) == 1.0


def test_a_master_in_two_halves_is_exact() -> None:
    x = numbers(5000).float() * torch.logspace(-20, 20, 5000)
    weight = torch.zeros(5000, dtype=torch.bfloat16)
    master = Remainder(weight)
    master.write(x)
    assert torch.equal(master.read(), x) and torch.equal(weight, x.bfloat16())
    tie = torch.tensor([1 + 2**-8, -1 - 2**-8])
    master = Remainder(weight[:2])
    master.write(tie)
    assert torch.equal(master.read(), tie) and weight[:2].float().abs().tolist() == [1 + 2**-7] * 2


def test_remainders_step_like_masters() -> None:
    whole_, plain = trained(OptimConfig(), torch.bfloat16)
    halves, split = trained(OptimConfig(master_remainders=True), torch.bfloat16)
    assert all(torch.equal(whole_[n], halves[n]) for n in SHAPES)
    for a, b in zip(plain.slots(), split.slots(), strict=True):
        assert a.name == b.name and torch.equal(a.kept.stored(), b.kept.stored())
    assert split.nbytes("master") * 2 == plain.nbytes("master")


# ---- settings by name ------------------------------------------------------------------------------------------------


def test_groups_change_rate_decay_and_rule() -> None:
    cfg = OptimConfig(param_groups=("embed.*:lr_mult=0.5,wd_mult=0", "*norm*:optimizer=lion,wd_mult=2"))
    ours, optimizer = trained(cfg)
    plain, _ = trained(OptimConfig())
    assert torch.equal(ours["layers.0.a.weight"], plain["layers.0.a.weight"])
    w = torch.nn.Parameter(numbers(9, 4))
    reference = torch.optim.AdamW([w], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(4):
        w.grad = 0.5 * numbers(9, 4, seed=10 * step + 1)
        reference.param_groups[0]["lr"] = 0.05 / (step + 1)
        reference.step()
    assert torch.allclose(ours["embed.weight"], w.detach(), rtol=1e-12)
    assert {s.name for s in optimizer.slots() if "norm" in s.name} == {"momentum/layers.0.norm.weight"}


def test_what_is_frozen_has_no_state_and_stays() -> None:
    ours, optimizer = trained(OptimConfig(freeze=("embed.*", "*norm*")))
    assert torch.equal(ours["embed.weight"], numbers(9, 4)) and torch.equal(ours["layers.0.norm.weight"], numbers(4))
    assert not [s.name for s in optimizer.slots() if "embed" in s.name or "norm" in s.name]
    assert len(optimizer.views) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"param_groups": ("embed.*:lr_mult=1", "emb*:lr_mult=2")}, "both match embed.weight and set another lr_mult"),
        ({"param_groups": ("embd.*:lr_mult=1",)}, "no parameter has such a name"),
        ({"freeze": ("nothing",)}, "no parameter has such a name"),
        ({"freeze": ("embed.*",), "param_groups": ("*:lr_mult=1",)}, "what is frozen is not stepped"),
        ({"param_groups": ("*norm*:optimizer=muon",)}, "muon makes matrices orthogonal"),
        ({"param_groups": ("*:lr_mult=-1",)}, "once each"),
        ({"param_groups": ("*:optimizer=adagrad",)}, "second moments only grow.*optimizers are adamw"),
        ({"param_groups": ("lr_mult=1",)}, "a pattern, a colon"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        settle(SHAPES, replace(OptimConfig(), **changes))


def test_what_agrees_is_no_conflict() -> None:
    found = settle(SHAPES, OptimConfig(param_groups=("embed.*:lr_mult=2", "*.weight:lr_mult=2", "embed.*:wd_mult=0")))
    assert found["embed.weight"].lr_mult == 2 and found["embed.weight"].wd_mult == 0
    assert found["layers.0.a.weight"].wd_mult is None
