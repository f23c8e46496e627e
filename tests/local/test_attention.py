"""Attention against one written out head by head: grouped queries, documents, dropout, fused and explicit paths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.models import llama_hf
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn import kernels
from isotron.core.nn.attention import Attention, Causal
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.rope import angles, rotate
from isotron.core.nn.softmax_config import SOFTMAX_TYPES

B, S, H, K, N, D = 2, 6, 4, 2, 4, 8


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_()


def context(isolate: bool) -> Context:
    ids = torch.zeros(B, S, dtype=torch.int64)
    docs = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]]) if isolate else None
    batch = Batch(ids, ids, torch.ones(B, S), torch.arange(S).expand(B, -1), torch.arange(B), docs)
    return Context(batch, angles(batch.positions, N, 100.0, torch.float64))


def written_out(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    out = torch.zeros(B, H, S, N, dtype=q.dtype)
    docs = ctx.batch.doc_ids
    for b in range(B):
        for h in range(H):
            for i in range(S):
                seen = [j for j in range(i + 1) if docs is None or docs[b, j] == docs[b, i]]
                g = h // (H // K)
                scores = torch.stack([q[b, h, i] @ k[b, g, j] / math.sqrt(N) for j in seen])
                out[b, h, i] = torch.softmax(scores, 0) @ v[b, g, seen]
    return out


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("path", ["flash", "halved", "fused", "explicit", "recomputed"])
def test_the_core(isolate: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, core = context(isolate), Causal(Dropout(0.5, "d")).eval()
    if path == "halved":  # causal squares of 6 and of 3 queries, backward
        monkeypatch.setattr(kernels, "HOST_SQUARE", 2)
    q, k, v = numbers(B, H, S, N), numbers(B, K, S, N), numbers(B, K, S, N)
    if path == "fused":
        core.backend = "fused"
    if path in ("explicit", "recomputed"):  # dropout is on, and drops nothing
        core.train()
        core.dropout._drop = lambda x, *at: x  # type: ignore[method-assign]
        core.recompute = path == "recomputed"
    ours, plain = core(q, k, v, ctx), written_out(q, k, v, ctx)
    assert torch.allclose(ours, plain, rtol=1e-10)
    up = torch.randn_like(plain)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), up), torch.autograd.grad(plain, (q, k, v), up), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("isolate", [False, True])
def test_the_fused_path_in_float32(isolate: bool) -> None:
    ctx, core = context(isolate), Causal(Dropout(0.0, "d"))
    q, k, v = numbers(B, H, S, N), numbers(B, K, S, N), numbers(B, K, S, N)
    narrow = core(q.float(), k.float(), v.float(), ctx)
    wide = written_out(q, k, v, ctx)
    assert (narrow - wide).abs().max() < 1e-6 * wide.abs().max() * 4


def test_recomputed_dropout_draws_the_same_mask() -> None:
    found = []
    q, k, v = numbers(B, H, S, N), numbers(B, K, S, N), numbers(B, K, S, N)
    for recompute in (False, True):
        core = Causal(Dropout(0.5, "d")).train()
        core.recompute = recompute
        found.append(torch.autograd.grad(core(q, k, v, context(False)).square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_module_splits_q_k_v_and_rotates_queries_and_keys() -> None:
    made = Attention(D, H, K, N, Dropout(0.0, "d"), bias=True).double()
    for p in made.parameters():
        p.data = numbers(*p.shape).detach()
    ctx, x = context(False), numbers(B, S, D)
    q, k, v = made.qkv(x).view(B, S, H + 2 * K, N).split([H, K, K], 2)
    q, k = rotate(q, ctx.rope), rotate(k, ctx.rope)  # type: ignore[arg-type]
    o = written_out(*(t.transpose(1, 2) for t in (q, k, v)), ctx)
    want = torch.nn.functional.linear(o.transpose(1, 2).flatten(2), made.out.weight, made.out.bias)
    assert torch.allclose(made(x, ctx), want, rtol=1e-10)


def test_the_future_is_not_seen() -> None:
    made = Attention(D, H, K, N, Dropout(0.0, "d"), bias=False).double()
    for p in made.parameters():
        p.data = numbers(*p.shape).detach()
    x = numbers(B, S, D)
    (dx,) = torch.autograd.grad(made(x, context(False))[:, 2].sum(), x)
    assert dx[:, :3].any() and not dx[:, 3:].any()


def test_bounded_scores_and_their_gradients() -> None:
    ctx, cap = context(True), 0.4
    core, q, k, v = (
        Causal(Dropout(0.0, "d"), softcap=cap),
        numbers(B, H, S, N),
        numbers(B, K, S, N),
        numbers(B, K, S, N),
    )
    wide_k, wide_v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    docs = ctx.batch.doc_ids
    assert docs is not None
    seen = (docs[:, :, None] == docs[:, None]).tril()[:, None]
    scores = torch.tanh(q @ wide_k.transpose(-1, -2) / math.sqrt(N) / cap) * cap
    plain = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ wide_v
    ours = core(q, k, v, ctx)
    assert torch.allclose(ours, plain, rtol=1e-10)
    for a, b in zip(torch.autograd.grad(ours.sin().sum(), (q, k, v)), torch.autograd.grad(plain.sin().sum(), (q, k, v)),
                    strict=True):  # fmt: skip
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    core.backend = "flash"
    with pytest.raises(Refused, match=r"no bound on scores, and this model has 0.4(.|\n)*--attention-backend auto"):
        core(q, k, v, ctx)


def test_a_softmax_with_a_sink() -> None:
    """Off-by-one is a sink of score 0, where a learned one begins; a sink far below all scores is none."""
    x, ctx, found = numbers(B, S, D).detach(), context(False), {}
    for kind in SOFTMAX_TYPES:
        found[kind] = Attention(D, H, K, N, Dropout(0.0, "core"), False, softmax_type=kind).double()
        for p in (found[kind].qkv.weight, found[kind].out.weight):
            p.data = numbers(*p.shape).data
    plain, one, learned = (found[kind](x, ctx) for kind in SOFTMAX_TYPES)
    assert torch.equal(one, learned) and not torch.allclose(plain, one, rtol=1e-3)
    found["learnable"].sinks.data.fill_(-50.0)
    assert torch.allclose(found["learnable"](x, ctx), plain, rtol=1e-12)
    # keys of scores 0.3 and -1 with values of 1: what attention gives is what the sink leaves
    scores = torch.tensor([0.3, -1.0], dtype=torch.float64)
    batch = Batch(*torch.zeros(2, 1, 2, dtype=torch.long), torch.ones(1, 2), torch.arange(2)[None], torch.zeros(1))
    ones = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    core = Causal(Dropout(0.0, "core"), scale=1.0)
    o = core(ones, scores.view(1, 1, 2, 1), ones, Context(batch), torch.zeros(1, dtype=torch.float64))
    total = scores.exp().cumsum(0)
    assert torch.allclose(o.flatten(), total / (1 + total), rtol=1e-12)


def test_sinks_are_no_part_of_llama_elsewhere() -> None:
    with pytest.raises(Refused, match="softmax_type is 'learnable', llama means 'vanilla'"):
        llama_hf.write_config(LlamaConfig(softmax_type="learnable"))
