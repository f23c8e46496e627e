"""How tokens come to their experts and back: the socket `dispatcher` of a block with experts.

Legend: B batch, S sequence, T = B*S tokens, K experts per token, E experts, N rows sorted by expert, D hidden.

A dispatcher takes tokens with their routing and gives rows sorted by expert; `send_back` sends the experts' rows home,
where `combine` adds up those of each token. Tokens may come in several parts, each on its own way. `Local` is the one
for experts that are all held here, whole or split by width over tensor-parallel ranks (then `enter` gathers what the
ranks' tokens are and `leave` adds up the ranks' parts). Both directions are one pass over memory: rows are copied once,
in order, and added once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from isotron.core.nn.experts import counts_of
from isotron.core.nn.linear import Socket


@dataclass(frozen=True)
class Routing:
    """Which experts each token visits and with what weight. `experts` of `num_experts` means dropped.

    `capacity`: rows that every expert computes per sequence, 0 when there are as many as come.
    """

    weights_BSK: Tensor
    experts_BSK: Tensor
    num_experts: int
    drops: bool = False
    capacity: int = 0


Tokens = tuple[Tensor, Routing]  # x_BSD and where each goes


def halves(x_BSD: Tensor, routing: Routing) -> list[Tokens]:
    """The tokens in two parts: by row, or the tokens of the only row; the second may be empty."""
    dim = 0 if len(x_BSD) > 1 else 1
    n = x_BSD.shape[dim]
    both = (t.split([n - n // 2, n // 2], dim) for t in (x_BSD, routing.weights_BSK, routing.experts_BSK))
    return [(x, replace(routing, weights_BSK=w, experts_BSK=e)) for x, w, e in zip(*both, strict=True)]


def whole(parts: Sequence[Tensor], like_BSD: Tensor) -> Tensor:
    """What became of each part, put together."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 0 if len(like_BSD) > 1 else 1)


@dataclass
class Sent:
    """Tokens on their way: rows sorted by expert, their weights, rows per expert held here, and the way back."""

    rows_ND: Tensor
    weights_N: Tensor
    counts_E: Tensor
    back: Any


class Dispatcher(Protocol):
    """What a block with experts needs."""

    def dispatch(self, parts: Sequence[Tokens]) -> list[Sent]:
        """The tokens of each part to where their experts are; they may still be under way."""
        ...

    def arrive(self, sent: Sent) -> Sent:
        """The same, arrived: rows sorted by expert."""
        ...

    def send_back(self, y_ND: Tensor, sent: Sent) -> Sent:
        """What the experts made of a part's rows to where its tokens came from; it may still be under way."""
        ...

    def combine(self, sent: Sent) -> Tensor:
        """x_BSD: each token's rows added up."""
        ...


class _Through(torch.autograd.Function):
    """A socket as an operation of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, socket: Socket) -> Tensor:
        ctx.socket = socket
        y = socket.forward(x).wait()
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.socket.backward(dy.contiguous()).wait(), None


def through(x: Tensor, socket: Socket | None) -> Tensor:
    """x on its way through a socket."""
    if socket is None:
        return x
    return _Through.apply(x, socket) if x.is_floating_point() else socket.forward(x).wait()


def gather_sum(x: Tensor, place_TK: Tensor) -> Tensor:
    """Row t: the sum of x's rows place[t, :]; rows beyond x's last are zero. Accumulated in float32 or wider."""
    if place_TK.shape[1] == 1 or x.shape[1] == 0:
        return x.index_select(0, place_TK[:, 0]) if place_TK.shape[1] == 1 else x.new_empty(len(place_TK), 0)
    return embedding_bag(place_TK, x, mode="sum")


def _with_zeros(x: Tensor, wanted: bool) -> Tensor:
    """One more row of zeros, for rows without a token and visits without a row."""
    return torch.cat((x, x.new_zeros(1, x.shape[1]))) if wanted else x


class _Spread(torch.autograd.Function):
    """Rows of tokens: y_n = x[token_n]. Its transpose is the sum of each token's rows, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _with_zeros(x, order.padded).index_select(0, order.token_N)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        order = ctx.order
        return gather_sum(_with_zeros(dy, order.missing).contiguous(), order.place_TK), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return gather_sum(_with_zeros(y, order.missing), order.place_TK)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        order = ctx.order
        return _with_zeros(dx, order.padded).index_select(0, order.token_N), None


def spread(x_TD: Tensor, order: Order) -> Tensor:
    """The tokens' rows in the order of their experts."""
    return _Spread.apply(x_TD, order)


def collect(y_ND: Tensor, order: Order) -> Tensor:
    """Each token's rows added up."""
    return _Collect.apply(y_ND, order)


@dataclass(frozen=True)
class Order:
    """Where each token's rows are. `token_N`: the token of a row; `place_TK`: the rows of a token.

    `padded`: some rows belong to no token (its number is one past the last, a row of zeros). `missing`: some visits
    have no row (place N, a row of zeros).
    """

    token_N: Tensor
    place_TK: Tensor
    choice_N: Tensor  # which of the T*K visits a row is
    counts_E: Tensor
    padded: bool
    missing: bool


def sort_by_expert(experts_TK: Tensor, number: int, drops: bool, slots: int = 0) -> Order:
    """The order of rows: by expert, inside it by token. `slots` above 0: every expert has that many rows."""
    tokens, k = experts_TK.shape
    flat = experts_TK.reshape(-1)
    counts = counts_of(flat, number)
    order = torch.argsort(flat, stable=True)
    if drops:
        order = order[: int(counts.sum())]
    n = len(order)
    target = torch.arange(n, device=flat.device)
    if slots:
        starts = counts.cumsum(0) - counts
        expert = flat[order]
        target, n = expert * slots + (target - starts[expert]), number * slots
    place = torch.full_like(flat, n)
    place[order] = target
    token = torch.full((n,), tokens, device=flat.device)
    token[target] = order // k
    choice = torch.full((n,), tokens * k, device=flat.device)
    choice[target] = order
    counts = torch.full_like(counts, slots) if slots else counts
    return Order(token, place.view(tokens, k), choice, counts, bool(slots), drops)


def rows_of_visits(weights_BSK: Tensor, order: Order) -> Tensor:
    """The weight of every row; 0 where a row belongs to no token."""
    flat = weights_BSK.reshape(-1)
    flat = torch.cat((flat, flat.new_zeros(1))) if order.padded else flat
    return flat.index_select(0, order.choice_N)


class Local:
    """Tokens of this rank meet the experts `held` here, all of them unless said otherwise.

    `enter` and `leave`: of ranks that see their tokens together, because they split every expert's width or hold
    different experts. `sequences`: how many times a rank's own sequences they see.
    """

    def __init__(
        self, enter: Socket | None = None, leave: Socket | None = None, held: range | None = None, sequences: int = 1
    ) -> None:
        self.enter, self.leave, self.held, self.sequences = enter, leave, held, sequences

    def dispatch(self, parts: Sequence[Tokens]) -> list[Sent]:
        """Rows of all tokens that the ranks see together."""
        return [self._gathered(*part) for part in parts]

    def _gathered(self, x_BSD: Tensor, routing: Routing) -> Sent:
        x, weights, experts = (through(t, self.enter) for t in (x_BSD, routing.weights_BSK, routing.experts_BSK))
        k, slots = experts.shape[2], routing.capacity * len(x) * self.sequences
        number, drops = routing.num_experts, routing.drops
        if self.held is not None and len(self.held) < number:
            own = (experts >= self.held.start) & (experts < self.held.stop)
            number, drops = len(self.held), True
            experts = (experts - self.held.start).masked_fill(~own, number)
        order = sort_by_expert(experts.reshape(-1, k), number, drops, slots)
        rows = spread(x.reshape(-1, x.shape[2]), order)
        return Sent(rows, rows_of_visits(weights, order), order.counts_E, (order, x.shape))

    def arrive(self, sent: Sent) -> Sent:
        """Nothing is under way."""
        return sent

    def send_back(self, y_ND: Tensor, sent: Sent) -> Sent:
        """Nothing is under way."""
        return replace(sent, rows_ND=y_ND)

    def combine(self, sent: Sent) -> Tensor:
        """x_BSD."""
        order, shape = sent.back
        return through(collect(sent.rows_ND, order).view(shape), self.leave)
