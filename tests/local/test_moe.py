"""Routers, balance losses, dispatch and grouped experts against plain loops, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.nn.context import Context
from isotron.core.nn.dispatch import gather_sum, sort_by_expert
from isotron.core.nn.experts import Experts
from isotron.core.nn.grouped import Groups
from isotron.core.nn.linear import GradSink
from isotron.core.nn.moe import MoE
from isotron.core.nn.moe_config import layer_pattern, pattern_text
from isotron.core.nn.router import Router, best, sinkhorn, within_capacity

D, F, E, B, S = 12, 8, 6, 2, 10


def config(**fields: Any) -> MixtralConfig:
    return MixtralConfig(1, D, 2, 2, ffn_hidden_size=F, **{"num_experts": E, **fields})


def moe(cfg: MixtralConfig, kind: type = MoE) -> Any:
    made = kind(cfg, D, "layers.0").double()
    generator = torch.Generator().manual_seed(3)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5
    return made


def inputs() -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def context(first: int = 0) -> Context:
    zeros = torch.zeros(B, S, dtype=torch.long)
    batch = Batch(zeros, zeros, zeros.float(), torch.arange(S).expand(B, -1), torch.arange(first, first + B))
    return Context(batch, terms={}, sequence_weight=0.5)


def by_loop(layer: MoE, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    w1 = layer.experts.gate_up.weight.view(E, 2, F, D)
    w2 = layer.experts.down.weight.view(E, D, F)
    out = []
    for token, own, chosen in zip(x.view(-1, D), weights.view(B * S, -1), experts.view(B * S, -1), strict=True):
        total = torch.zeros(D, dtype=x.dtype)
        for weight, e in zip(own, chosen.tolist(), strict=True):
            if e < E:
                gate, up = w1[e] @ token
                total = total + weight * (w2[e] @ (torch.nn.functional.silu(gate) * up))
        out.append(total)
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"moe_router_topk": 1, "moe_norm_topk_prob": False},
    ],
    ids=("dropless", "drops", "padded", "one"),
)
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_are_a_sum_over_a_tokens_choices(fields: dict[str, Any], recompute: bool) -> None:
    layer, x = moe(config(**fields)), inputs()
    layer.recompute = recompute
    routing = layer.router(x, context())
    plain = by_loop(layer, x, routing.weights_BSK, routing.experts_BSK)
    ours = layer(x, context())
    assert torch.allclose(ours, plain, rtol=1e-12)
    up = torch.randn_like(ours)
    wanted = [x, *layer.parameters()]
    for a, b in zip(torch.autograd.grad(ours, wanted, up), torch.autograd.grad(plain, wanted, up), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (1, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_two_halves_are_the_whole(shape: tuple[int, int], padded: bool) -> None:
    """Results, gradients and visits; of odd numbers of rows and of tokens, and of one token."""
    cfg = config(moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True, moe_aux_loss_coeff=0.1,
                 moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=padded)  # fmt: skip
    zeros, found = torch.zeros(shape, dtype=torch.long), []
    for in_halves in (False, True):
        layer, x = moe(cfg), torch.linspace(-1, 1, D * shape[0] * shape[1], dtype=torch.float64).sin()
        if in_halves:
            layer.set_halves()
        x = x.view(*shape, D).requires_grad_()
        ctx = Context(Batch(zeros, zeros, zeros.double(), zeros, zeros[:, 0]), terms={})
        y = layer(x, ctx)
        y.square().sum().backward()
        found.append((y, x.grad, *(p.grad for p in layer.parameters()), *(term for term, _ in ctx.terms.values())))
    for whole, halves in zip(*found, strict=True):
        assert torch.allclose(whole.double(), halves.double(), rtol=1e-10, atol=1e-12)


def test_gradients_of_experts_go_to_their_sinks_now_or_later() -> None:
    x, found = inputs(), []
    for later in (None, []):
        layer = moe(config())
        sinks = [GradSink(torch.full_like(p.data, torch.nan)) for p in layer.parameters()]
        for p, sink in zip(layer.parameters(), sinks, strict=True):
            p.grad_sink, sink.later = sink, later
        for _ in range(2):
            layer(x, context()).square().sum().backward()
            while later:
                later.pop(0)()
        assert all(p.grad is None for p in layer.parameters())
        found.append([sink.buffer for sink in sinks])
    layer = moe(config())
    (2 * layer(x, context()).square().sum()).backward()
    for now, put_off, plain in zip(*found, layer.parameters(), strict=True):
        assert torch.allclose(now, plain.grad) and torch.equal(now, put_off)


def test_equal_scores_go_to_the_lower_number() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert best(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


def routed(x: Tensor, **fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts."""
    router = moe(config(**fields), Router)
    if fields.get("moe_router_enable_expert_bias"):
        router.expert_bias = torch.tensor([0.0, 0.5, -0.5, 0.0, 0.2, 0.0], dtype=torch.float64)
    routing = router(x, context())
    return x @ router.weight.t(), routing.weights_BSK, routing.experts_BSK


def test_softmax_before_and_after_the_choice() -> None:
    logits, weights, experts = routed(inputs())
    top, chosen = logits.topk(2)
    assert torch.equal(experts, chosen) and torch.allclose(weights, top.softmax(-1))
    logits, weights, experts = routed(inputs(), moe_norm_topk_prob=False, moe_router_topk_scaling_factor=2.0)
    assert torch.allclose(weights, 2 * logits.softmax(-1).gather(-1, experts))


def test_a_selection_bias_chooses_and_does_not_weigh() -> None:
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    logits, weights, experts = routed(inputs(), **fields)
    scores = logits.sigmoid()
    bias = torch.tensor([0.0, 0.5, -0.5, 0.0, 0.2, 0.0], dtype=torch.float64)
    assert torch.equal(experts, (scores + bias).topk(2)[1])
    own = scores.gather(-1, experts)
    assert torch.allclose(weights, own / own.sum(-1, keepdim=True))
    assert not torch.equal(experts, scores.topk(2)[1])


def test_experts_come_from_the_best_groups() -> None:
    fields = {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 3, "moe_router_group_topk": 1}
    logits, _, experts = routed(inputs(), **fields)
    groups = logits.sigmoid().unflatten(-1, (3, 2)).sum(-1).argmax(-1)
    assert torch.equal(experts.sort(-1)[0], torch.stack((2 * groups, 2 * groups + 1), -1))


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_an_expert_drops(policy: str) -> None:
    generator = torch.Generator().manual_seed(5)
    experts = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(B * S)]).view(B, S, 2)
    weights = torch.rand(B, S, 2, generator=generator)
    kept = within_capacity(experts, weights, E, 3, policy)
    for b in range(B):
        for e in range(E):
            here = (experts[b] == e).nonzero().tolist()
            if policy == "probs":
                here.sort(key=lambda place: -float(weights[b, place[0], place[1]]))
            assert {tuple(p) for p in here[:3]} == {tuple(p) for p in here if kept[b, p[0], p[1]]}


def test_sinkhorn_gives_every_token_and_every_expert_an_equal_share() -> None:
    shares = sinkhorn(torch.randn(B, S, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    assert torch.allclose(shares.sum(1), torch.full((B, E), 1 / E, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(shares.sum(2), torch.full((B, S), 1 / S, dtype=torch.float64), atol=1e-2)


@pytest.mark.parametrize("kind", ["sequence", "batch", "global"])
def test_balance_and_z_losses(kind: str) -> None:
    cfg = config(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)
    router, x, ctx = moe(cfg, Router), inputs(), context()
    router.balance.frequencies = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    routing = router(x, ctx)
    logits = x @ router.weight.t()
    share, visits = logits.softmax(-1).mean(1), torch.nn.functional.one_hot(routing.experts_BSK, E).double()
    f = {"sequence": visits.mean((1, 2)), "batch": visits.mean((0, 1, 2)), "global": router.balance.frequencies}
    value, weight = ctx.terms["balance/layers.0"]  # type: ignore[index]
    assert torch.allclose(value, E * (f[kind] * share).sum()) and weight == pytest.approx(0.1 * 0.5)
    value, weight = ctx.terms["z/layers.0"]  # type: ignore[index]
    assert torch.allclose(value, logits.logsumexp(-1).square().mean(1).sum()) and weight == pytest.approx(0.01 * 0.5)
    assert torch.equal(ctx.terms["load/layers.0"][0], visits.sum((0, 1, 2)))  # type: ignore[index]


def test_an_even_router_has_balance_one() -> None:
    cfg = config(moe_aux_loss_coeff=1.0, moe_router_topk=E)
    router, ctx = moe(cfg, Router), context()
    router.weight.data.zero_()
    router(inputs(), ctx)
    assert float(ctx.terms["balance/layers.0"][0].detach()) == pytest.approx(B)  # type: ignore[index]


def test_evaluation_neither_drops_nor_shakes_nor_reports() -> None:
    cfg = config(moe_expert_capacity_factor=0.5, moe_input_jitter_eps=0.1)
    layer, x, ctx = moe(cfg).eval(), inputs(), context()
    plain = moe(config())
    assert torch.equal(layer(x, ctx), plain(x, context())) and not ctx.terms


def test_jitter_depends_on_the_sample_alone() -> None:
    router, x = moe(config(moe_input_jitter_eps=0.3), Router), inputs()
    shaken, again = router._jittered(x, context()), router._jittered(x, context())
    assert torch.equal(shaken, again)
    ratio = (shaken / x).detach()
    assert 0.7 <= float(ratio.min()) < 0.75 and 1.25 < float(ratio.max()) <= 1.3
    moved = router._jittered(x.flip(0), context(first=1))
    assert torch.allclose((moved / x.flip(0))[0], ratio[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_compute_in_float32(dtype: torch.dtype) -> None:
    router = Router(config(moe_norm_topk_prob=False), D, "layers.0").to(dtype)
    generator = torch.Generator().manual_seed(4)
    router.weight.data = torch.randn(E, D, generator=generator).to(dtype)
    x = inputs().detach().to(dtype)
    routing = router(x, context())
    logits = x.float() @ router.weight.float().t()
    assert routing.weights_BSK.dtype is torch.float32
    assert torch.allclose(routing.weights_BSK, logits.softmax(-1).topk(2)[0], rtol=1e-6)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("slots", [0, 14])
def test_order_of_rows(drops: bool, slots: int) -> None:
    experts = torch.randint(0, E + int(drops), (20, 2), generator=torch.Generator().manual_seed(7))
    order = sort_by_expert(experts, E, drops, slots)
    x = torch.randn(20, 3)
    rows = torch.cat((x, x.new_zeros(1, 3)))[order.token_N]
    expert_of_row = torch.repeat_interleave(torch.arange(E), order.counts_E)
    for n, token in enumerate(order.token_N.tolist()):
        assert token == 20 or int(expert_of_row[n]) in experts[token].tolist()
    back = gather_sum(torch.cat((rows, rows.new_zeros(1, 3))), order.place_TK)
    assert torch.allclose(back, x * (experts < E).sum(1, keepdim=True))


@pytest.mark.parametrize("sizes", [(3, 0, 5, 2), (0, 0, 0, 0), (10, 0, 0, 0)])
def test_grouped_products(sizes: tuple[int, ...]) -> None:
    counts = torch.tensor(sizes)
    x, w = torch.randn(int(counts.sum()), 5), torch.randn(4, 5, 3)
    plain = [part @ m for part, m in zip(x.split(list(sizes)), w, strict=True)]
    found = [span.product(x[span.rows], w) for span in Groups(counts).spans(5, 3, like=x)]
    assert torch.allclose(torch.cat(found), torch.cat(plain), atol=1e-6)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    experts = Experts(2, D, F).double()
    for p in experts.parameters():
        p.data.normal_()
    x = torch.randn(3, D, dtype=torch.float64)
    experts(x, torch.ones(3, dtype=torch.float64), torch.tensor([0, 3])).sum().backward()
    assert not experts.gate_up.weight.grad[: 2 * F].any() and experts.gate_up.weight.grad[2 * F :].any()


@pytest.mark.parametrize(
    ("text", "layers", "which"),
    [("1", 3, "111"), ("2", 5, "10101"), ("[0]*2+[1]*2", 4, "0011"), ("([0,1]*2+[1])", 5, "01011"), ("[1,0]", 2, "10")],
)
def test_patterns_of_blocks(text: str, layers: int, which: str) -> None:
    found = layer_pattern(text, layers)
    assert "".join(str(int(x)) for x in found) == which
    assert layer_pattern(pattern_text(found), layers) == found


@pytest.mark.parametrize("text", ["0", "[0,1]", "[2]*3", "([1]*3", "x", "[1]*3+", "[1]*3]"])
def test_patterns_that_are_none(text: str) -> None:
    with pytest.raises(Refused, match="--moe-layer-freq"):
        layer_pattern(text, 3)


def test_biases_move_by_one_rate_and_survive_a_narrow_model() -> None:
    from isotron.core.mesh import Mesh
    from isotron.core.parallel.model import ParallelModel
    from isotron.core.parallel.plan import Layout
    from isotron.core.parallel.routing import move_biases, routers

    cfg = replace(
        config(vocab_size=11, max_position_embeddings=8),
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=1e-4,
    )
    layout = Layout(dp=1, make_vocab_size_divisible_by=1)
    model = ParallelModel(cfg, layout, Mesh(), torch.bfloat16, torch.device("cpu"), 1)
    (router,) = routers(model)
    router.expert_bias.fill_(1.0)
    for _ in range(100):
        move_biases(model, {"load/layers.0": torch.tensor([0.0, 9.0, 3.0, 3.0, 3.0, 0.0])})
    assert router.expert_bias.dtype is torch.float32
    assert torch.allclose(router.expert_bias, torch.tensor([1.01, 0.99, 1.0, 1.0, 1.0, 1.01]), atol=1e-6)
