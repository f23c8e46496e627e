"""The linear operation against plain autograd: bias, pre, frozen weights, sockets, gradient sinks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from isotron.core import comm
from isotron.core.nn import linear as linears
from isotron.core.nn.linear import GradSink, Linear, _Linear
from isotron.core.nn.norm import LayerNorm, RMSNorm


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pre", [None, gelu])
def test_gradcheck(bias: bool, pre: object) -> None:
    x, w, b = random(2, 3, 5), random(4, 5), random(4) if bias else None
    assert torch.autograd.gradcheck(lambda *a: _Linear.apply(*a, pre, None, None), (x, w, b))


@pytest.mark.parametrize("frozen", ["x", "w", "b", "xb", "wb", "xw"])
def test_frozen_inputs_get_nothing_and_the_others_what_they_should(frozen: str) -> None:
    def inputs() -> dict[str, Tensor]:
        found = {"x": random(2, 3, 5), "w": random(4, 5), "b": random(4)}
        return {k: v.requires_grad_(k not in frozen) for k, v in found.items()}

    ours, plain = inputs(), inputs()
    (_Linear.apply(ours["x"], ours["w"], ours["b"], gelu, None, None) ** 2).sum().backward()
    (linear(gelu(plain["x"]), plain["w"], plain["b"]) ** 2).sum().backward()
    for name in ours:
        a, b = ours[name].grad, plain[name].grad
        assert (a is None) == (b is None) == (name in frozen)
        assert a is None or torch.allclose(a, b, atol=1e-12)


def layer(norm: type[torch.nn.Module]) -> tuple[Linear, torch.nn.Module]:
    made = Linear(5, 4, bias=True).double(), norm(5, 1e-5).double()
    for i, p in enumerate(p for m in made for p in m.parameters()):
        p.data = random(*p.shape, seed=i).detach()
    return made


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("x_needs_gradient", [True, False])
@pytest.mark.parametrize("w_needs_gradient", [True, False])
def test_the_parameters_of_pre_get_their_gradients(
    norm: type[torch.nn.Module], x_needs_gradient: bool, w_needs_gradient: bool
) -> None:
    found = []
    for inside in (True, False):
        up, before = layer(norm)
        up.weight.requires_grad_(w_needs_gradient)
        x = random(2, 3, 5).requires_grad_(x_needs_gradient)
        (up(x, before) if inside else up(before(x))).pow(2).sum().backward()
        found.append([p.grad for p in (*up.parameters(), *before.parameters(), x)])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-12)


class Times:
    """A socket that multiplies by a constant and counts its calls."""

    def __init__(self, by: float) -> None:
        self.by, self.calls = by, []

    def forward(self, x: Tensor) -> comm.Pending:
        self.calls.append("forward")
        return comm.done(x * self.by)

    def backward(self, dx: Tensor) -> comm.Pending:
        self.calls.append("backward")
        return comm.done(dx * self.by)


def test_sockets_stand_around_the_product_and_the_bias_comes_last() -> None:
    enter, leave = Times(2.0), Times(3.0)
    x, w, b = random(2, 3, 5), random(4, 5), random(4)
    assert torch.allclose(_Linear.apply(x, w, b, None, enter, leave), 6 * linear(x, w) + b)
    assert torch.autograd.gradcheck(lambda *a: _Linear.apply(*a, gelu, enter, leave), (x, w, b))
    enter.calls.clear()
    _Linear.apply(x, w.detach(), b, None, enter, leave).sum().backward()
    assert enter.calls == ["forward", "backward"]  # a frozen weight needs no second gathering of its input


def sink_for(p: Tensor, dtype: torch.dtype) -> GradSink:
    p.grad_sink = GradSink(torch.full(p.shape, torch.nan, dtype=dtype))  # type: ignore[attr-defined]
    return p.grad_sink  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deferred", [True, False])
def test_gradients_accumulate_in_the_sink(dtype: torch.dtype, deferred: bool) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    up = Linear(5, 4, bias=True).to(dtype)
    up.weight.data, up.bias.data = random(4, 5).detach().to(dtype), random(4).detach().to(dtype)
    sinks = [sink_for(p, wide) for p in up.parameters()]
    written: list[int] = []
    for sink in sinks:
        sink.on_write = lambda s: written.append(id(s))
        sink.later = [] if deferred else None
    xs = [random(2, 3, 5, seed=i).detach().to(dtype) for i in range(2)]
    for x in xs:
        up(x).sum().backward()
    for work in sinks[0].later or []:
        work()
    assert up.weight.grad is None and up.bias.grad is None
    assert len(written) == 4 and set(written) == {id(s) for s in sinks}
    want = torch.ones(4, 6, dtype=wide) @ sum(x.to(wide).reshape(6, 5) for x in xs)
    error = (sinks[0].buffer - want).abs().max() / want.abs().max()
    assert error < (1e-2 if dtype is torch.bfloat16 else 1e-6)
    assert torch.equal(sinks[1].buffer, torch.full((4,), 12.0, dtype=wide))


@pytest.mark.parametrize("block", [1, 7, 20, 64])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_a_narrow_gradient_is_added_whole_in_blocks_of_any_size(
    block: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "ADD_ELEMENTS", block)
    total, part = random(4, 5).detach(), random(5, 4).detach().to(kind).t()
    want = total + part.double()
    linears.add_narrow(total, part)
    assert torch.equal(total, want)


def test_a_fresh_sink_forgets_what_was_there() -> None:
    w = random(4, 5)
    sink = sink_for(w, torch.float64)
    assert sink.fresh
    sink.clear_if_fresh()
    assert not sink.buffer.any() and not sink.fresh
    sink.add(torch.ones(4, 5))
    sink.clear_if_fresh()
    assert sink.buffer.sum() == 20
    sink.fresh = True
    sink.add_rows(torch.tensor([1, 1, 3]), torch.ones(3, 5))
    assert sink.buffer.sum(1).tolist() == [0, 10, 0, 5]
