"""Fused kernels of a GPU against explicit probabilities in float32: documents, windows, bounded scores, sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core import device as devices
from isotron.core.nn import backends
from isotron.core.nn.attention import Causal
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.flash import Flash, PackageCalls, TorchCalls
from isotron.core.nn.kernels import Explicit, tiled
from isotron.core.nn.tiles import tiles
from isotron.core.rows import zigzag

pytestmark = pytest.mark.gpu
B, S, H, K, N = 2, 640, 4, 2, 64
DOCUMENTS = ((0, 3, 333, S), (0, 128, 129, S))
OPTIONS: list[dict[str, Any]] = [{}, {"window": 50}, {"causal": False}, {"softcap": 5.0, "window": 200}]


def tensors(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(B, H, S, N), (B, K, S, N), (B, K, S, N), (H,)]
    return [torch.randn(s, generator=draw).to(devices.resolve("cuda"), dtype).requires_grad_() for s in shapes]


def outcome(core: Causal, cuts: Any, dtype: torch.dtype) -> list[Tensor]:
    """o and the gradients of q, k, v and sinks, in float32."""
    given = tensors(dtype)
    o = core.over(*given[:3], cuts, torch.arange(B, device=given[0].device), given[3])
    up = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o)
    return [x.float() for x in (o, *torch.autograd.grad((o * up).sum(), given))]


def near(found: list[Tensor], want: list[Tensor], bound: float) -> None:
    for a, b in zip(found, want, strict=True):
        assert float((a - b).abs().max()) <= bound * float(b.abs().max())


@pytest.mark.parametrize("cuts", [None, DOCUMENTS])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel", ["torch", "package", "flex", "flex in float32"])
def test_whole_rows(kernel: str, options: dict[str, Any], cuts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, core, dtype = devices.resolve("cuda"), Causal(Dropout(0.0, "d"), **options), torch.bfloat16
    core.backend = "fused"
    if kernel.startswith("flex"):
        monkeypatch.setattr(backends, "_flash", lambda want: None)
        dtype = torch.float32 if kernel.endswith("float32") else dtype
    elif kernel == "torch":
        if "softcap" in options:
            pytest.skip("torch's flash kernel has no bound on scores")
        monkeypatch.setattr(devices, "flash_package", lambda device: None)
    elif devices.flash_package(device) is None:
        pytest.skip("the flash-attn package is not installed")
    explicit = Causal(Dropout(0.0, "d"), **options)
    explicit.backend = "unfused"
    near(outcome(core, cuts, dtype), outcome(explicit, cuts, torch.float32), 1e-4 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("window", [0, 50, 300])
@pytest.mark.parametrize("library", ["torch", "package"])
def test_tiles_of_a_ring(library: str, window: int) -> None:
    api = devices.flash_package(devices.resolve("cuda"))
    if library == "package" and api is None:
        pytest.skip("the flash-attn package is not installed")
    calls = TorchCalls() if library == "torch" or api is None else PackageCalls(api)
    for mine, theirs in ((0, 0), (1, 0), (0, 1)):
        plan = tiles(zigzag(mine, 2, 2 * S), zigzag(theirs, 2, 2 * S), ((0, 301, 2 * S),) * B, B, window)
        found = []
        for dtype, kernel in ((torch.bfloat16, Flash(0.125, calls)), (torch.float32, Explicit(0.125))):
            q, k, v, _ = tensors(dtype)
            o = tiled(q, k, v, plan, kernel)
            up = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o)
            found.append([x.float() for x in (o, *torch.autograd.grad((o * up).sum(), (q, k, v)))])
        near(*found, 3e-2)
