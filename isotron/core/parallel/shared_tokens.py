"""Tokens that all tensor-parallel ranks hold, on their way to experts: each rank takes its share, none goes twice.

Legend: B batch, S sequence, T = B*S tokens, K experts per token, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from isotron.core import comm
from isotron.core.mesh import Group
from isotron.core.nn.dispatch import Dispatcher, Routing, Sent, Tokens, through


@dataclass(frozen=True)
class Cut:
    """The own share of dimension 1; gradients of the shares are put together."""

    group: Group

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.done(x.chunk(self.group.size, 1)[self.group.index].contiguous())

    def backward(self, dx: Tensor) -> comm.Pending:
        return comm.start_all_gather(dx, self.group, 1)


@dataclass(frozen=True)
class Join:
    """All shares of dimension 1; every rank has the whole gradient."""

    group: Group

    def forward(self, x: Tensor) -> comm.Pending:
        return comm.start_all_gather(x, self.group, 1)

    def backward(self, dx: Tensor) -> comm.Pending:
        return comm.done(dx.chunk(self.group.size, 1)[self.group.index].contiguous())


class Shared:
    """The shares of a group of ranks, which `inner` sends on. Shares are equal: the last one may end in rows that visit
    no expert.
    """

    def __init__(self, inner: Dispatcher, group: Group) -> None:
        self.inner, self.group = inner, group

    def dispatch(self, parts: Sequence[Tokens]) -> list[Sent]:
        """The own share of the tokens."""
        sent = self.inner.dispatch([self._share(*part) for part in parts])
        return [replace(s, back=(s, x.shape)) for s, (x, _) in zip(sent, parts, strict=True)]

    def _share(self, x_BSD: Tensor, routing: Routing) -> Tokens:
        b, s, d = x_BSD.shape
        short = -(b * s) % self.group.size
        cut = Cut(self.group)
        rows = through(pad(x_BSD.reshape(1, b * s, d), (0, 0, 0, short)), cut)
        k = routing.weights_BSK.shape[2]
        weights = through(pad(routing.weights_BSK.reshape(1, b * s, k), (0, 0, 0, short)), cut)
        experts = pad(routing.experts_BSK.reshape(1, b * s, k), (0, 0, 0, short), value=routing.num_experts)
        share = replace(
            routing,
            weights_BSK=weights,
            experts_BSK=through(experts, cut),
            drops=routing.drops or short > 0,
            capacity=routing.capacity * b,
        )
        return rows, share

    def arrive(self, sent: Sent) -> Sent:
        """The inner one's rows."""
        inner, shape = sent.back
        arrived = self.inner.arrive(inner)
        return replace(arrived, back=(arrived, shape))

    def send_back(self, y_ND: Tensor, sent: Sent) -> Sent:
        """The inner one's rows."""
        inner, shape = sent.back
        return replace(sent, back=(self.inner.send_back(y_ND, inner), shape))

    def combine(self, sent: Sent) -> Tensor:
        """x_BSD, whole on every rank."""
        inner, shape = sent.back
        share = self.inner.combine(inner)
        return through(share, Join(self.group))[:, : shape[0] * shape[1]].reshape(shape)
