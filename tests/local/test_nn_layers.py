"""Norms, activations, rotation and embeddings against plain references and numerical gradients, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, rms_norm, silu

from isotron.core import comm
from isotron.core.nn.embedding import Embedding, Positions
from isotron.core.nn.linear import GradSink
from isotron.core.nn.mlp import MLP, GatedMLP, swiglu
from isotron.core.nn.norm import LayerNorm, RMSNorm
from isotron.core.nn.rope import angles, rotate


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def with_weights(module: torch.nn.Module) -> torch.nn.Module:
    for p in module.parameters():
        p.data = random(*p.shape).detach()
    return module


def same_gradients(module: torch.nn.Module, ours: Tensor, plain: Tensor, x: Tensor) -> None:
    inputs = [x, *module.parameters()]
    up = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, inputs, up), torch.autograd.grad(plain, inputs, up), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_rms_norm() -> None:
    norm, x = with_weights(RMSNorm(6, 1e-3)), random(2, 3, 6)
    plain = rms_norm(x, (6,), norm.weight, 1e-3)
    assert torch.allclose(norm(x), plain, rtol=1e-12)
    same_gradients(norm, norm(x), plain, x)


def test_layer_norm() -> None:
    norm, x = with_weights(LayerNorm(6, 1e-3)), random(2, 3, 6)
    plain = layer_norm(x, (6,), norm.weight, norm.bias, 1e-3)
    assert torch.allclose(norm(x), plain, rtol=1e-12)
    same_gradients(norm, norm(x), plain, x)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_statistics_are_wide(kind: type, dtype: torch.dtype) -> None:
    norm = kind(4096, 1e-5).to(dtype)
    norm.weight.data.fill_(1)
    if kind is LayerNorm:
        norm.bias.data.zero_()
    x = torch.full((1, 4096), 3.0, dtype=dtype)
    x[:, ::2] = -3.0
    y = norm(x * 100)  # the sum of squares passes the range of float16
    assert y.dtype is dtype and torch.allclose(y.abs().float(), torch.ones(1, 4096), rtol=1e-2)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_gains_go_to_their_sinks(kind: type) -> None:
    plain, sunk = with_weights(kind(6, 1e-3)), with_weights(kind(6, 1e-3))
    for p in sunk.parameters():
        p.grad_sink = GradSink(torch.full_like(p.data, torch.nan))
    for norm in (plain, sunk):
        for _ in range(2):
            norm(random(2, 3, 6)).pow(2).sum().backward()
    for a, b in zip(plain.parameters(), sunk.parameters(), strict=True):
        assert b.grad is None and torch.allclose(a.grad, b.grad_sink.buffer)


def test_swiglu() -> None:
    x = random(2, 3, 8)
    assert torch.allclose(swiglu(x), silu(x[..., :4]) * x[..., 4:])
    assert torch.autograd.gradcheck(swiglu, (x,))
    assert torch.autograd.gradcheck(swiglu, (x.transpose(0, 1),))


@pytest.mark.parametrize(
    "make", [lambda: GatedMLP(4, 6), lambda: MLP(4, 6, "gelu", True), lambda: MLP(4, 6, "gelu_tanh", True)]
)
def test_recomputing_the_activation_changes_nothing(make: object) -> None:
    mlp, x = with_weights(make().double()), random(2, 3, 4)  # type: ignore[operator]
    inputs = [x, *mlp.parameters()]
    kept = torch.autograd.grad(mlp(x).pow(2).sum(), inputs)
    mlp.recompute = True
    again = torch.autograd.grad(mlp(x).pow(2).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotation as multiplication of complex numbers, one pair at a time."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    turn = positions[..., None, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = z * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((z.real, z.imag), -1)


def test_rotation() -> None:
    x, positions = random(2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 0, 1, 2]])
    rope = angles(positions, 8, 100.0, torch.float64)
    assert torch.allclose(rotate(x, rope), turned(x, positions, 100.0), rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rope), (x,))


def test_rotated_products_depend_on_distance_only() -> None:
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8) + 1

    def product(i: int, j: int) -> float:
        a, b = (rotate(x, angles(torch.tensor([[p]]), 8, 1e4, torch.float64)) for x, p in ((q, i), (k, j)))
        return float((a * b).sum().detach())

    assert math.isclose(product(3, 1), product(1003, 1001), rel_tol=1e-9)
    assert not math.isclose(product(3, 1), product(4, 1), rel_tol=1e-3)


def test_angles_of_far_positions_are_formed_in_float32() -> None:
    cos, _ = angles(torch.tensor([[8191]]), 8, 1e4, torch.bfloat16)
    assert cos.dtype is torch.bfloat16
    assert torch.allclose(cos[0, 0, 0, 0].float(), torch.tensor(math.cos(8191)).float(), atol=4e-3)


def test_embedding() -> None:
    table, ids = with_weights(Embedding(7, 4)), torch.tensor([[1, 1, 6], [0, 2, 1]])
    assert torch.equal(table(ids), embedding(ids, table.weight))
    up = torch.randn(2, 3, 4, dtype=torch.float64)
    (ours,) = torch.autograd.grad(table(ids), table.weight, up)
    (plain,) = torch.autograd.grad(embedding(ids, table.weight), table.weight, up)
    assert torch.allclose(ours, plain)


class Nothing:
    """A socket of one rank."""

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.done(x)

    backward = forward


def test_a_part_of_the_vocabulary_gives_zero_outside_and_the_parts_add_up() -> None:
    full, ids = random(8, 4).detach(), torch.tensor([[0, 3, 4, 6]])
    up = torch.randn(1, 4, 4, dtype=torch.float64)
    total, grads = 0, []
    for first, rows, real in ((0, 4, 4), (4, 4, 3), (torch.iinfo(torch.int32).max, 4, 0)):  # the last: padding only
        part = Embedding(rows, 4).double()
        part.weight.data = full[first : first + rows].clone() if real else torch.zeros(rows, 4, dtype=torch.float64)
        part.first, part.real, part.leave = first, real, Nothing()
        y = part(ids)
        total = total + y
        grads.append(torch.autograd.grad(y, part.weight, up)[0])
    assert torch.equal(total, full[ids])
    want = torch.zeros(8, 4, dtype=torch.float64).index_add_(0, ids[0], up[0])
    assert torch.equal(torch.cat(grads[:2]), want) and not grads[2].any()
    assert not grads[1][3].any()  # the padding row


def test_positions_of_the_local_part_of_the_sequence() -> None:
    table, at = with_weights(Positions(9, 4)), torch.arange(8).expand(2, 8)
    whole = table(at)
    parts = []
    for i in range(4):
        table.sequence = (i, 4)
        parts.append(table(at))
    assert torch.equal(torch.cat(parts, 1), whole)
