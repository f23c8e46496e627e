"""Attention that is not causal, and sinks, in every core: against probabilities written out, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.nn.attention import Causal
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.parallel.context import context_core, local_batch
from isotron.core.parallel.plan import Layout
from isotron.core.rows import slots

S = 16
KINDS = ("p2p", "allgather", "a2a", "a2a+p2p")


def rows(isolate: bool) -> Batch:
    numbers = torch.arange(2 * S).view(2, S)
    docs = torch.stack([(torch.arange(S) >= 5).long(), torch.arange(S) // 7]) if isolate else None
    return Batch(numbers, numbers, torch.ones(2, S), torch.arange(S).expand(2, -1), torch.arange(2), docs)


def inputs() -> list[Tensor]:
    """q, k, v, the gradient of o, sinks."""
    g = torch.Generator().manual_seed(3)
    shapes = ((2, 8, S, 4), (2, 2, S, 4), (2, 2, S, 4), (2, 8, S, 4), (8,))
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def gradients(core: Callable[..., Tensor], ctx: Context, where: Tensor, sinks: bool) -> tuple[Tensor, ...]:
    """o, dq, dk, dv and the sinks' gradient of some slots of the rows."""
    q, k, v, do, s = inputs()
    own = [x[:, :, where].clone().requires_grad_() for x in (q, k, v)]
    scores = s.clone().requires_grad_() if sinks else None
    o = core(*own, ctx, scores)
    o.backward(do[:, :, where])
    return o.detach(), *(x.grad for x in own), scores.grad if scores is not None else torch.zeros(8)  # type: ignore[misc]


def written_out(causal: bool, isolate: bool, sinks: bool) -> tuple[Tensor, ...]:
    batch = rows(isolate)

    def core(q: Tensor, k: Tensor, v: Tensor, ctx: Context, s: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(4, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / 2
        hidden = torch.zeros(2, 1, S, S, dtype=torch.bool)
        if causal:
            hidden |= torch.ones(S, S, dtype=torch.bool).triu(1)
        if batch.doc_ids is not None:
            hidden |= (batch.doc_ids[:, :, None] != batch.doc_ids[:, None])[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        if s is not None:
            scores = torch.cat((scores, s[None, :, None, None].expand(2, -1, S, 1)), -1)
        return torch.softmax(scores, -1)[..., :S] @ v

    return gradients(core, Context(batch), torch.arange(S), sinks)


def plain(causal: bool) -> Causal:
    return Causal(Dropout(0.0, "core"), causal=causal)


def on_rank(causal: bool, isolate: bool, sinks: bool) -> dict[str, list[float]]:
    """How far each kind is from the same core on one rank."""
    mesh = Mesh(dist.get_rank(), cp=4)
    group = mesh.group("cp")
    whole = gradients(plain(causal), Context(rows(isolate)), torch.arange(S), sinks)
    local = local_batch(rows(isolate), group.index, group.size)
    where = torch.tensor(slots(local.part.runs[group.index]))  # type: ignore[union-attr]
    found = {}
    for kind in KINDS:
        core = context_core(plain(causal), kind, Layout(dp=1, cp=4, hierarchical_cp_sizes=(2, 2)), mesh)
        *parts, score = gradients(core, Context(local), where, sinks)
        comm.all_reduce(score, group)
        pairs = [*zip(parts, (x[:, :, where] for x in whole[:4]), strict=True), (score, whole[4])]
        found[kind] = [float((a - b).abs().max()) for a, b in pairs]
    return found


CHOICES = [(False, False, False), (False, True, True), (True, False, True), (True, True, True)]


@pytest.mark.parametrize(("causal", "isolate", "sinks"), CHOICES)
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_against_probabilities(causal: bool, isolate: bool, sinks: bool, backend: str) -> None:
    core = plain(causal)
    core.backend = backend
    found = gradients(core, Context(rows(isolate)), torch.arange(S), sinks)
    for a, b in zip(found, written_out(causal, isolate, sinks), strict=True):
        assert torch.allclose(a, b.to(a), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("causal", "isolate", "sinks"), CHOICES[1:3])
def test_every_core(ranks: Callable[..., list[Any]], causal: bool, isolate: bool, sinks: bool) -> None:
    for found in ranks(4, on_rank, causal, isolate, sinks):
        assert all(max(far) < 1e-12 for far in found.values()), found


def test_a_window_is_causal() -> None:
    with pytest.raises(ValueError, match="looks behind it"):
        Causal(Dropout(0.0, "core"), window=4, causal=False)
