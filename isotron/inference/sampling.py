"""From logits to tokens: temperature, top-k, top-p, one draw per row.

Legend: B rows, V the real vocabulary. Everything is computed in float64, so that a layout's rounding hardly moves it.
A draw is a function of (seed, request, position): no generator state, the same token in any batch and layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isotron.core.random import key
from isotron.inference.config import Sampling

NOT_A_TOKEN = -1


def choose(logits_BV: Tensor, sampling: Sampling, places: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, each [B]. `places`: (request, position) of each row's new token.

    The log-probability is the model's own: of the unfiltered distribution at temperature 1. A row whose logits are not
    finite gives `NOT_A_TOKEN`.
    """
    logits = logits_BV.double()
    if sampling.temperature == 0:
        tokens = first_of_largest(logits)
    else:
        points = [uniform(sampling.seed, request, position) for request, position in places]
        drawn_B = torch.tensor(points, dtype=torch.float64, device=logits.device)
        tokens = draw(probabilities(logits, sampling), drawn_B)
    own = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    broken = ~logits.amax(-1).isfinite()
    return tokens.masked_fill(broken, NOT_A_TOKEN), own


def uniform(seed: int, request: int, position: int) -> float:
    """A number in [0, 1) with 52 bits: of the draw at `position` of a request's sequence."""
    return (key(seed, "generate", request, position) >> 11) / 2**52


def first_of_largest(logits_BV: Tensor) -> Tensor:
    """[B]: the likeliest token; of several the one with the lowest id."""
    v = logits_BV.shape[-1]
    ids = torch.arange(v, device=logits_BV.device)
    lower = logits_BV != logits_BV.amax(-1, keepdim=True)
    return ids.expand_as(logits_BV).masked_fill(lower, v).amin(-1).clamp(max=v - 1)


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] in float64: softmax at the temperature, then exactly the k likeliest, then the fewest of them that hold
    `top_p` of what is left; the rest is 0. Of equals the lower id goes first."""
    v = logits_BV.shape[-1]
    scores = logits_BV.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    k = sampling.top_k if 0 < sampling.top_k < v else v
    if k == v and sampling.top_p in (0, 1):
        return torch.softmax(scores, -1)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(ordered[:, :k], -1)
    if sampling.top_p not in (0, 1):
        before = p.cumsum(-1) - p
        p = p.masked_fill(before >= sampling.top_p, 0.0)
    return torch.zeros_like(scores).scatter_(-1, order[:, :k], p / p.sum(-1, keepdim=True))


def draw(p_BV: Tensor, drawn_B: Tensor) -> Tensor:
    """[B]: the token in whose share of [0, 1) the number falls; shares lie in the order of ids.

    In that order rounding moves the borders by a rounding, while in the order of probabilities two tokens of nearly the
    same probability could change places.
    """
    shares = p_BV.cumsum(-1)
    target = drawn_B[:, None] * shares[:, -1:]
    return torch.searchsorted(shares, target, right=True)[:, 0].clamp(max=p_BV.shape[-1] - 1)
