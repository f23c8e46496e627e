"""The router: scores of every expert for every token, and which of them a token visits.

Legend: B batch, S sequence (its local part), D hidden, E experts, K experts per token, G groups. All of it in float32
or wider, whatever the model's type. Ties go to the expert with the lower number, so that a recomputed forward, another
layout and another device choose alike.

Softmax over all experts and weights that sum to 1 is the softmax over the chosen ones. With a selection bias experts
are chosen by score + bias, and weighted by score. Capacities are per sequence, never per rank or microbatch. Socket
`sequence`: how the ranks meet that hold parts of the same sequences.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.batch import Origin
from isotron.core.nn.balance import Balance, z_values
from isotron.core.nn.context import Context
from isotron.core.nn.dispatch import Routing
from isotron.core.nn.linear import GradSink, sink_of
from isotron.core.nn.moe_config import MoEConfig
from isotron.core.random import key, uniform

Terms = dict[str, tuple[Tensor, float]]
SINKHORN_ROUNDS = 16  # a fixed number: a test for convergence would make one sequence depend on its neighbours


class Sequence(Protocol):
    """Socket: the ranks that hold parts of the same sequences, in order."""

    @property
    def index(self) -> int:
        """Which part of dimension 1 this rank holds."""
        ...

    @property
    def size(self) -> int:
        """Parts of a sequence."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        ...

    def whole(self, x: Tensor) -> Tensor:
        """The whole of dimension 1, without a gradient."""
        ...

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of dimension 1."""
        ...


class _Logits(torch.autograd.Function):
    """x W^T + b in float32 or wider, gradients of W and b to their sinks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.sinks = sink_of(w), None if bias is None else sink_of(bias)
        ctx.save_for_backward(x, w)
        y = x.to(wide) @ w.to(wide).t()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = (dy @ w.to(dy.dtype)).to(x.dtype)
        dw = rows.t() @ x.reshape(-1, x.shape[-1]).to(dy.dtype)
        db = _deliver(ctx.sinks[1], rows.sum(0), w.dtype) if ctx.needs_input_grad[2] else None
        return dx, _deliver(ctx.sinks[0], dw, w.dtype), db


def _deliver(sink: GradSink | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    if sink is None:
        return grad.to(dtype)
    sink.add(grad)
    return None


def best(scores: Tensor, k: int) -> Tensor:
    """Numbers of the k highest entries of the last dimension, highest first, the lower number first among equals."""
    left, found = scores.detach().clone(), []
    for _ in range(k):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def in_groups(scores_E: Tensor, groups: int, chosen: int, counted: int) -> Tensor:
    """Scores with -inf outside the `chosen` best groups; a group's rank is the sum of its `counted` best scores."""
    by_group = scores_E.detach().unflatten(-1, (groups, -1))
    of_group = by_group.topk(counted, -1)[0].sum(-1)
    open_G = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, best(of_group, chosen), True)
    return scores_E.masked_fill(~open_G.repeat_interleave(by_group.shape[-1], -1), -torch.inf)


def sinkhorn(logits_BSE: Tensor) -> Tensor:
    """exp(logits), rows and columns scaled in turn so that every token and every expert has an equal share."""
    cost = (logits_BSE - logits_BSE.amax((1, 2), keepdim=True)).exp()
    rows = torch.ones_like(cost[..., :1])
    columns = torch.ones_like(cost[:, :1])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (cost.shape[1] * (cost * columns).sum(2, keepdim=True) + 1e-8)
        columns = 1 / (cost.shape[2] * (cost * rows).sum(1, keepdim=True) + 1e-8)
    return rows * cost * columns


def within_capacity(experts_BSK: Tensor, weights_BSK: Tensor, number: int, capacity: int, policy: str) -> Tensor:
    """Which visits of whole sequences are kept: per sequence and expert the `capacity` heaviest, or first, ones."""
    b, s, k = experts_BSK.shape
    flat = (experts_BSK + number * torch.arange(b, device=experts_BSK.device)[:, None, None]).reshape(-1)
    if policy == "probs":
        order = torch.argsort(weights_BSK.reshape(-1), descending=True, stable=True)
        order = order[torch.argsort(flat[order], stable=True)]
    else:
        order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=b * number)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    return (place < capacity).view(b, s, k)


class Router(nn.Module):
    """W_ED with the rules of the model. `name`: of its block, for random numbers and reports.

    Buffer `expert_bias` (float32 or wider, where the model has one) moves once per step; what its tokens' visits
    are compared with is set from outside for each step of a global balance loss (`balance.frequencies`).
    """

    expert_bias: Tensor

    def __init__(self, cfg: MoEConfig, hidden: int, name: str, bias: bool = False) -> None:
        super().__init__()
        self.cfg, self.name, self.seed = cfg, name, 0
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(cfg.num_experts)) if bias else None
        if cfg.moe_router_enable_expert_bias:
            self.register_buffer("expert_bias", torch.zeros(cfg.num_experts))
        self.balance = Balance(cfg)
        self.sequence: Sequence | None = None

    def forward(self, x_BSD: Tensor, ctx: Context) -> Routing:
        """The routing of these tokens; in training the block's terms of the loss go to `ctx.terms`."""
        cfg = self.cfg
        logits = _Logits.apply(self._jittered(x_BSD, ctx), self.weight, self.bias)
        softmax = cfg.moe_router_score_function == "softmax"
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        experts = self._choose(logits, scores)
        weights = scores.gather(-1, experts)
        if cfg.moe_router_load_balancing_type == "sinkhorn":
            weights = logits.gather(-1, experts)
            weights = weights.sigmoid() if cfg.moe_router_topk == 1 else weights.softmax(-1)
        elif cfg.moe_norm_topk_prob and softmax:
            weights = logits.gather(-1, experts).softmax(-1)
        elif cfg.moe_norm_topk_prob and cfg.moe_router_topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * cfg.moe_router_topk_scaling_factor
        routing = self._limited(weights, experts)
        if self.training and ctx.terms is not None:
            self._report(
                ctx, ctx.terms, logits, scores if softmax else scores / scores.sum(-1, keepdim=True), experts, routing
            )
        return routing

    def _jittered(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x times 1 +- epsilon, drawn for each element of each sample."""
        eps = self.cfg.moe_input_jitter_eps
        if not eps or not self.training:
            return x_BSD
        _, s, d = x_BSD.shape
        first = s * self.sequence.index if self.sequence else 0
        at, features = (torch.arange(n, device=x_BSD.device) for n in (s, d))
        salt = key(self.seed, f"{self.name}.jitter")
        samples, slots = ctx.batch.sample_ids[:, None], at + first
        if ctx.batch.origin is not None:
            samples, slots = (self._own(t) for t in (ctx.batch.origin.samples_BS, ctx.batch.origin.slots_BS))
        noise = uniform(salt, samples[..., None], slots[..., None], features)
        return x_BSD * (1 - eps + 2 * eps * noise).to(x_BSD.dtype)

    def _own(self, x_BS: Tensor) -> Tensor:
        """Of the tokens held here."""
        return self.sequence.own(x_BS) if self.sequence else x_BS

    def _choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Experts of every token, [B, S, K]."""
        cfg = self.cfg
        with torch.no_grad():
            if cfg.moe_router_load_balancing_type == "sinkhorn":
                return best(self._sinkhorn(logits) if self.training else logits, cfg.moe_router_topk)
            if cfg.moe_router_enable_expert_bias:
                chosen_by = scores + self.expert_bias
            else:  # logits order as softmax does, and do not round to the same number where softmax is near one
                chosen_by = (
                    scores if cfg.moe_router_num_groups or cfg.moe_router_score_function != "softmax" else logits
                )
            if cfg.moe_router_num_groups:
                groups, chosen = cfg.moe_router_num_groups, cfg.moe_router_group_topk
                chosen_by = in_groups(chosen_by, groups, chosen, cfg.group_scores)
            return best(chosen_by, cfg.moe_router_topk)

    def _sinkhorn(self, logits: Tensor) -> Tensor:
        if self.sequence is None:
            return sinkhorn(logits)
        return self.sequence.own(sinkhorn(self.sequence.whole(logits)))

    def _limited(self, weights: Tensor, experts: Tensor) -> Routing:
        """In training, visits beyond an expert's capacity are dropped; what remains keeps its weight."""
        cfg, e = self.cfg, self.cfg.num_experts
        if not cfg.moe_expert_capacity_factor or not self.training:
            return Routing(weights, experts, e)
        whole = self.sequence.whole if self.sequence else lambda x: x
        own = self.sequence.own if self.sequence else lambda x: x
        with torch.no_grad():
            every = whole(experts)
            share = every.shape[1] * cfg.moe_router_topk / e
            capacity = max(1, -int(-share * cfg.moe_expert_capacity_factor // 1))
            kept = own(within_capacity(every, whole(weights.detach()), e, capacity, cfg.moe_token_drop_policy))
        slots = capacity if cfg.moe_pad_expert_input_to_capacity else 0
        return Routing(weights, experts.masked_fill(~kept, e), e, True, slots)

    def _report(
        self, ctx: Context, terms: Terms, logits: Tensor, shares: Tensor, experts: Tensor, routing: Routing
    ) -> None:
        """The block's terms: balance and z (sums over sequences), visits per expert, dropped visits."""
        cfg = self.cfg
        if ctx.batch.origin is not None:
            self._report_anew(ctx, terms, logits, shares, experts, ctx.batch.origin)
            return
        counts_BE = torch.zeros_like(shares[:, 0]).scatter_add_(
            1, experts.flatten(1), torch.ones_like(shares[:, :1, :1]).expand(experts.shape).flatten(1)
        )
        split = self.sequence.size if self.sequence else 1
        length = experts.shape[1] * split
        terms[f"load/{self.name}"] = counts_BE.sum(0), 0.0
        if self.balance.active:
            whole = self.sequence.sum(counts_BE) if self.sequence else counts_BE
            value = self.balance(shares, whole / (length * cfg.moe_router_topk), length)
            terms[f"balance/{self.name}"] = value, cfg.moe_aux_loss_coeff * ctx.sequence_weight
        if cfg.moe_z_loss_coeff:
            terms[f"z/{self.name}"] = z_values(logits, length), cfg.moe_z_loss_coeff * ctx.sequence_weight
        if routing.drops:
            terms[f"dropped/{self.name}"] = (routing.experts_BSK == cfg.num_experts).sum(), 0.0

    def _report_anew(
        self, ctx: Context, terms: Terms, logits: Tensor, shares: Tensor, experts: Tensor, origin: Origin
    ) -> None:
        """The block's terms where documents were laid into new rows: a token counts in the row that it comes from."""
        cfg, rows_BS = self.cfg, self._own(origin.rows_BS)
        visits = shares.new_zeros(origin.rows + 1, cfg.num_experts)  # the last row is of tokens that fill up
        at = rows_BS.where(rows_BS >= 0, origin.rows)[..., None].expand_as(experts)
        visits.index_put_((at, experts), visits.new_ones(()), accumulate=True)
        terms[f"load/{self.name}"] = visits[:-1].sum(0), 0.0
        if self.balance.active:
            if self.balance.kind == "sequence":
                terms[f"visits/{self.name}"] = visits[:-1], 0.0
            value = self.balance.anew(shares, rows_BS, origin.length)
            terms[f"balance/{self.name}"] = value, cfg.moe_aux_loss_coeff * ctx.sequence_weight
        if cfg.moe_z_loss_coeff:
            value = z_values(logits, origin.length, rows_BS >= 0)
            terms[f"z/{self.name}"] = value, cfg.moe_z_loss_coeff * ctx.sequence_weight
