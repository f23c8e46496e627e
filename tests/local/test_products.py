"""Products by the library that is faster here are the products of torch, and are taken where they should be."""

from __future__ import annotations

import pytest
import torch

from isotron.core import device as devices
from isotron.core.nn import products


@pytest.fixture(params=[True, False])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With oneDNN for products of any size, and without; it can be had on any processor."""
    able = request.param and torch.backends.mkldnn.is_available()
    monkeypatch.setattr(products, "has_wide_instructions_unused", lambda *_: able)
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "HOST_ROWS", 7)
    return request.param


def test_large_products_are_taken_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the least size on, of float32, outside of autocast, where the device has it."""
    asked: list[tuple[int, ...]] = []
    real = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda x, w, b: asked.append(tuple(x.shape)) or real(x, w, b))
    able = torch.backends.mkldnn.is_available()
    monkeypatch.setattr(products, "has_wide_instructions_unused", lambda _, dtype: able and dtype is torch.float32)
    w, x, dy = torch.ones(256, 256), torch.ones(256, 256), torch.ones(256, 256)
    assert len(x) * w.numel() == products.LEAST
    products.times(x, w)
    products.back(dy, w)
    products.times_into(torch.empty(256, 256), x, w)
    assert len(asked) == 3 * able
    products.times(x[1:], w)
    products.times(x.bfloat16(), w.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert products.times(x, w).dtype is torch.bfloat16
    assert len(asked) == 3 * able


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_every_stride(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w, bias, x = (torch.randn(*s).to(dtype) for s in ((24, 40), (24,), (3, 11, 40)))
    wide_rows = torch.randn(3, 11, 96).to(dtype)
    precision = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}

    def same(found: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), want, **precision)

    for rows in (x, x.transpose(0, 1), wide_rows[..., :40], x[:1, :1].expand(3, 11, 40), x[:, :0]):
        same(products.times(rows, w), rows.double() @ w.double().t())
        same(products.times(rows, w, bias), rows.double() @ w.double().t() + bias.double())
    for dy in (torch.randn(3, 11, 24).to(dtype), wide_rows[..., 8:32]):
        same(products.back(dy, w), dy.double() @ w.double())
        flat, out = dy.reshape(33, 24), torch.empty(33, 40, dtype=dtype)
        same(products.times_into(out, flat, w.t()), flat.double() @ w.double())
    out = torch.empty(33, 24, dtype=dtype)
    for b in (None, bias):
        want = x.double().flatten(0, 1) @ w.double().t() + (0 if b is None else b.double())
        same(products.times_into(out, x.flatten(0, 1), w, b), want)


@pytest.mark.parametrize(
    ("vendor", "instructions", "used"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_processors_that_mkl_leaves_alone(
    monkeypatch: pytest.MonkeyPatch, vendor: str, instructions: str, used: bool
) -> None:
    monkeypatch.setattr(devices, "_host_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    devices._is_wide_host_of_others.cache_clear()
    host = torch.device("cpu")
    try:
        assert devices.has_wide_instructions_unused(host, torch.float32) is used
        assert not devices.has_wide_instructions_unused(host, torch.float64)
        assert not devices.has_wide_instructions_unused(torch.device("meta"), torch.float32)
    finally:
        devices._is_wide_host_of_others.cache_clear()
