"""What one GPU computes, against the CPU: the float64 rule, the 16-bit types, and the layout-free random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotron.core import device as devices
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.plan import Layout
from isotron.core.random import keep_mask
from isotron.train.verify import Case, compare, measure

pytestmark = pytest.mark.gpu

MODELS = {
    "gpt": GPTConfig(3, 64, 4, ffn_hidden_size=128, vocab_size=131, max_position_embeddings=32),
    "llama": LlamaConfig(3, 64, 4, 2, ffn_hidden_size=128, vocab_size=131, max_position_embeddings=32),
}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_float64_equals_the_cpu(model: str, recompute: str) -> None:
    case = Case(MODELS[model], Layout(dp=1, recompute=recompute))
    rows = compare(measure(replace(case, device="cuda")), measure(case))
    assert not [row for row in rows if not row.passes]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_types_track_the_cpu_in_float32(model: str, dtype: str) -> None:
    case = Case(MODELS[model], Layout(dp=1), dtype="float32")
    found, reference = measure(replace(case, device="cuda", dtype=dtype)), measure(case)
    bound = 1e-4 if dtype == "float32" else 3e-2
    assert found.losses == pytest.approx(reference.losses, rel=bound)


def test_dropout_masks_are_those_of_the_cpu() -> None:
    device = devices.resolve("cuda")
    coordinates = torch.arange(64)[:, None], torch.arange(512)
    there = keep_mask(0.3, 12345, *(c.to(device) for c in coordinates))
    assert torch.equal(there.cpu(), keep_mask(0.3, 12345, *coordinates))


def test_weight_gradients_are_not_rounded_to_16_bits() -> None:
    device = devices.resolve("cuda")
    dy, x = (torch.randn(512, n, device=device).bfloat16() for n in (64, 96))
    sink = GradSink(torch.zeros(64, 96, device=device))
    for _ in range(3):
        sink.add_outer(dy, x)
    exact = 3 * dy.double().t() @ x.double()
    assert float((sink.buffer - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_memory_of_a_step_returns() -> None:
    case = Case(MODELS["llama"], Layout(dp=1), device="cuda", dtype="bfloat16", steps=2)
    measure(case)
    before = torch.cuda.memory_allocated()
    measure(case)
    assert torch.cuda.memory_allocated() <= before
