"""Tokens are sent to the ranks of their experts, and the results back: two all-to-alls with uneven runs per block.

Legend: T tokens of this rank, K experts per token, E experts, N rows, D hidden. A group of `etp x ep` ranks holds all
experts; those that share an expert's width (etp) each get its rows, and what comes back from them is added up at home
with the rest. On the way: put in order by expert (one pass), sent, put in order by expert across the senders (one
pass). How many rows each rank gets is known after a gather of counts.

A transfer is two operations in the graph, its start and its end, with nothing but a ticket between them: what runs
between the two does so while tokens are under way, in the forward and, since a backward takes what is ready in the
reverse order, in the backward. That is the shared expert, and with tokens in two parts the experts of the other part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import Group
from isotron.core.nn.dispatch import Order, Routing, Sent, Tokens, collect, rows_of_visits, sort_by_expert, spread


@dataclass
class Flight:
    """A transfer: rows to and from each rank of a group, and what is under way."""

    group: Group
    sends: Sequence[int]
    receives: Sequence[int]
    pending: comm.Pending = field(default_factory=lambda: comm.Pending((), lambda: torch.empty(0)))


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.pending = comm.start_all_to_all(x.contiguous(), flight.sends, flight.receives, flight.group)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.pending.wait(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.pending.wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.pending = comm.start_all_to_all(dy.contiguous(), flight.receives, flight.sends, flight.group)
        return dy.new_empty(0), None


def depart(x: Tensor, flight: Flight) -> Tensor:
    """Start to send x's rows; the ticket with which `land` gets what comes."""
    return _Depart.apply(x, flight)


def land(ticket: Tensor, flight: Flight) -> Tensor:
    """The rows that came."""
    return _Land.apply(ticket, flight)


def copied(order: Order, experts_TK: Tensor, runs: Sequence[int], copies: int) -> Order:
    """The order in which every run of rows (of one expert-parallel rank) stands `copies` times in a row."""
    if copies == 1:
        return order
    device = order.token_N.device
    lengths = torch.tensor(runs, device=device)
    starts = lengths.cumsum(0) - lengths
    rows = torch.arange(len(order.token_N), device=device).split(list(runs))
    index = torch.cat([run for run in rows for _ in range(copies)])
    run_of = (experts_TK * len(runs)).div(len(order.counts_E), rounding_mode="floor").clamp(max=len(runs) - 1)
    within = order.place_TK - starts[run_of]
    places = (
        (starts * copies)[run_of][..., None]
        + within[..., None]
        + lengths[run_of][..., None] * torch.arange(copies, device=device)
    )
    gone = (experts_TK >= len(order.counts_E))[..., None]
    place = places.masked_fill(gone, len(index)).flatten(1)
    return replace(order, token_N=order.token_N[index], place_TK=place, choice_N=order.choice_N[index])


@dataclass
class _Back:
    """The way back: the order at home, the order here, the transfer, and the shape of the tokens."""

    home: Order
    here: Order
    flight: Flight
    weights: Flight
    shape: torch.Size


class AllToAll:
    """`group`: etp fastest, then ep. `copies`: etp. `held`: the experts here. `sequences`: how many times a rank's own
    sequences the group sees (for padding to a capacity).
    """

    def __init__(self, group: Group, copies: int, held: range, sequences: int = 1) -> None:
        self.group, self.copies, self.held, self.sequences = group, copies, held, sequences

    def dispatch(self, parts: Sequence[Tokens]) -> list[Sent]:
        """Rows and their weights set out, once it is known how many there are of all parts."""
        homes = [sort_by_expert(_visits(routing), routing.num_experts, routing.drops) for _, routing in parts]
        counts_GPE = comm.all_gather(torch.stack([home.counts_E for home in homes])[None], self.group, 0)
        return [
            self._set_out(*part, home, counts_GPE[:, i])
            for i, (part, home) in enumerate(zip(parts, homes, strict=True))
        ]

    def _set_out(self, x_BSD: Tensor, routing: Routing, home: Order, everyone: Tensor) -> Sent:
        ways = self.group.size // self.copies
        runs = everyone[self.group.index].view(ways, -1).sum(1).tolist()
        counts = everyone[:, self.held.start : self.held.stop]
        home = copied(home, _visits(routing), runs, self.copies)
        sends, receives = [n for n in runs for _ in range(self.copies)], counts.sum(1).tolist()
        flights = Flight(self.group, sends, receives), Flight(self.group, sends, receives)
        rows = depart(spread(x_BSD.reshape(-1, x_BSD.shape[2]), home), flights[0])
        weights = depart(rows_of_visits(routing.weights_BSK, home), flights[1])
        here = self._sorted(counts, routing.capacity * len(x_BSD) * self.sequences)
        return Sent(rows, weights, here.counts_E, _Back(home, here, *flights, x_BSD.shape))

    def _sorted(self, counts_GE: Tensor, slots: int) -> Order:
        """The order by expert of rows that come sorted by sender, each sender's by expert."""
        each = len(self.held)
        numbers = torch.arange(each, device=counts_GE.device).repeat(len(counts_GE))
        return sort_by_expert(numbers.repeat_interleave(counts_GE.flatten())[:, None], each, False, slots)

    def arrive(self, sent: Sent) -> Sent:
        """Rows in the order of the experts here."""
        back: _Back = sent.back
        rows, weights = land(sent.rows_ND, back.flight), land(sent.weights_N, back.weights)
        return replace(sent, rows_ND=spread(rows, back.here), weights_N=rows_of_visits(weights, back.here))

    def send_back(self, y_ND: Tensor, sent: Sent) -> Sent:
        """Results set out."""
        back: _Back = sent.back
        flight = Flight(self.group, back.flight.receives, back.flight.sends)
        return replace(sent, rows_ND=depart(collect(y_ND, back.here), flight), back=replace(back, flight=flight))

    def combine(self, sent: Sent) -> Tensor:
        """x_BSD."""
        back: _Back = sent.back
        return collect(land(sent.rows_ND, back.flight), back.home).view(back.shape)


def _visits(routing: Routing) -> Tensor:
    """The experts of each token, [T, K]."""
    return routing.experts_BSK.reshape(-1, routing.experts_BSK.shape[2])
