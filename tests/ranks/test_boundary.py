"""What stages hand on: several named tensors of different shapes, types and lengths, under every kind of table."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from isotron.core.mesh import Mesh
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.runtime import Runtime

Ranks = Callable[..., list[Any]]
LENGTHS = (5, 16, 9, 1)  # of the microbatches


class TwoStreams(nn.Module):
    """A stage that hands on a sequence, a summary that meets it, and marks without a gradient."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        start = torch.arange(16.0, dtype=torch.float64).view(4, 4)
        self.w = nn.Parameter(torch.sin(start + number))
        self.v = nn.Parameter(torch.tensor([0.5, 0.9], dtype=torch.float64) + number / 10)
        self.first, self.last, self.forget = number == 0, number == stages - 1, ""

    def forward(self, batch: Any, boundary: dict[str, Tensor], weight: float) -> tuple[Any, Any]:
        if self.first:
            x = torch.cos(batch.tokens[..., None] * torch.arange(1.0, 5.0, dtype=torch.float64))
            boundary = {"hidden": x, "summary": x.mean(1)[:, :2], "marks": batch.tokens % 3}
        x, summary, marks = boundary["hidden"], boundary["summary"], boundary["marks"]
        x = torch.tanh(x @ self.w + summary.sum(-1)[:, None, None])
        summary = summary * self.v + x.sum(1)[:, 2:]
        if self.last:
            return {}, {"loss": ((x * marks[..., None]).sum() + summary.square().sum(), weight)}
        made = {"hidden": x, "summary": summary, "marks": (marks + 1) % 3}
        return {name: t for name, t in made.items() if name != self.forget}, {}


def shapes(batch_shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    b, s = batch_shape
    return {"hidden": ((b, s, 4), torch.float64), "summary": ((b, 2), torch.float64), "marks": ((b, s), torch.int64)}


def run_step(name: str, p: int, v: int, forget: str = "") -> tuple[float, dict[int, list[Tensor]]]:
    """On one of p ranks: the loss, if it has it, and the gradients of its stages."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    table = plan(name, p, len(LENGTHS), v)
    own = {}
    for s in table.stages_of(rank):
        module = TwoStreams(s, table.stages)
        module.forget = forget
        flat = SimpleNamespace(watch=lambda: None, start_reduce=lambda: None)
        own[s] = SimpleNamespace(
            module=module, flat=flat, sinks=[], boundary_shapes=shapes, settle=lambda backward: None
        )
    tokens = [torch.arange(2 * n).view(2, n) * 7 % 11 for n in LENGTHS]
    batches: Any = [SimpleNamespace(shape=tuple(t.shape), tokens=t) for t in tokens]
    terms = Runtime(own, Mesh(rank, pp=p).group("pp"), overlap=False).run(table, batches, 1.0)
    return float(terms.get("loss", 0.0)), {s: [q.grad for q in stage.module.parameters()] for s, stage in own.items()}


@pytest.mark.parametrize("name, p, v", [("1f1b", 2, 1), ("interleaved", 2, 2), ("zb-h1", 3, 1), ("dualpipev", 2, 2)])
def test_several_tensors_of_any_length(ranks: Ranks, name: str, p: int, v: int) -> None:
    loss, gradients = run_step("1f1b", 1, p * v)
    found = ranks(p, run_step, name, p, v)
    assert sum(each[0] for each in found) == pytest.approx(loss, rel=1e-12)
    mine = {s: grads for each in found for s, grads in each[1].items()}
    assert sorted(mine) == sorted(gradients)
    for s, wanted in gradients.items():
        for a, b in zip(mine[s], wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), s


def test_a_stage_that_forgets_a_tensor_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 hands on .*hidden.*its neighbours agreed on .*summary"):
        run_step("1f1b", 1, 2, forget="summary")
