"""From logits to tokens: penalties, temperature, cuts, one draw per row; and the model's own log-probabilities.

Legend: B rows, V the real vocabulary. Whatever is drawn is computed in float64, so that a layout's rounding hardly
moves it. A draw is a function of (seed, request, position): no generator state, the same token in any batch and layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isotron.core.random import key
from isotron.inference.config import Sampling

NOT_A_TOKEN = -1
LIKELY = 1024  # tokens that are sorted first when the likeliest are looked for


@dataclass(frozen=True)
class Draw:
    """What the choice of a row's next token depends on: `history` are its tokens so far, the first `prompt` of them
    given; `allowed` marks the tokens that a grammar lets through [V]; `sample` counts the answers to one request."""

    sampling: Sampling
    request: int
    history: Sequence[int]
    prompt: int
    sample: int = 0
    allowed: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the likeliest token of the logits as they are is the answer."""
        return self.sampling.temperature == 0 and not self.sampling.adjusts and self.allowed is None

    @property
    def point(self) -> float:
        """The number in [0, 1) that decides."""
        return uniform(self.sampling.seed, self.request, len(self.history), self.sample)


def choose(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens [B]. A row whose logits are not finite gives `NOT_A_TOKEN`."""
    highest, tokens = logits_BV.max(-1)
    others = [i for i, d in enumerate(draws) if not d.plain]
    if others:
        some = [draws[i] for i in others]
        rows = logits_BV if len(others) == len(draws) else logits_BV[others]
        tokens[others] = _choose(adjusted(rows.double(), some), some)
    return tokens.masked_fill_(~highest.isfinite(), NOT_A_TOKEN)


def _choose(scores_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    greedy = scores_BV.argmax(-1)
    drawn = [i for i, d in enumerate(draws) if d.sampling.temperature > 0]
    if drawn:
        some = [draws[i] for i in drawn]
        points_B = torch.tensor([d.point for d in some], dtype=torch.float64, device=scores_BV.device)
        greedy[drawn] = draw(probabilities(scores_BV[drawn], [d.sampling for d in some]), points_B)
    return greedy


def uniform(seed: int, request: int, position: int, sample: int = 0) -> float:
    """A number in [0, 1) with 52 bits: of the draw at `position` of a request's sequence."""
    more = (sample,) if sample else ()
    return (key(seed, "generate", request, position, *more) >> 11) / 2**52


# ---- log-probabilities ---------------------------------------------------------------------------------------------


def own_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """[B] in nats: of the unfiltered distribution at temperature 1."""
    wide = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    return wide.gather(-1, tokens_B.clamp(min=0)[:, None])[:, 0] - wide.logsumexp(-1)


def likeliest(logits_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the `count` likeliest tokens, each [B, count]."""
    wide = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    values, ids = wide.topk(min(count, wide.shape[-1]), -1)
    return ids, values - wide.logsumexp(-1, keepdim=True)


# ---- logits -> scores ----------------------------------------------------------------------------------------------


def adjusted(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The logits with penalties, biases and grammars applied; changes its argument."""
    penal = [i for i, d in enumerate(draws) if d.sampling.penalises]
    if penal:
        logits_BV[penal] = _penalised(logits_BV[penal], [draws[i] for i in penal])
    biased = [(i, t, b) for i, d in enumerate(draws) for t, b in d.sampling.logit_bias]
    if biased:
        rows, ids, values = zip(*biased, strict=True)
        bias = torch.tensor(values, dtype=logits_BV.dtype, device=logits_BV.device)
        logits_BV.index_put_((_index(rows, logits_BV), _index(ids, logits_BV)), bias, accumulate=True)
    ruled = [i for i, d in enumerate(draws) if d.allowed is not None]
    if ruled:
        allowed = torch.stack([draws[i].allowed for i in ruled]).to(logits_BV.device)  # type: ignore[misc]
        logits_BV[ruled] = logits_BV[ruled].masked_fill(~allowed, -torch.inf)
    return logits_BV


def _penalised(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """repetition: Keskar et al. 2019 (CTRL), section 4.1; presence and frequency: as the OpenAI API defines them."""
    whole = _counts(logits_BV, [d.history for d in draws])
    answer = _counts(logits_BV, [d.history[d.prompt :] for d in draws])
    repetition, presence, frequency = (
        _column([getattr(d.sampling, f"{name}_penalty") for d in draws], logits_BV)
        for name in ("repetition", "presence", "frequency")
    )
    weakened = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    scores = torch.where(whole > 0, weakened, logits_BV)
    return scores - presence * (answer > 0) - frequency * answer


def _counts(like_BV: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, V]: how often each token occurs in each row."""
    flat = [i * like_BV.shape[1] + t for i, row in enumerate(rows) for t in row]
    return _index(flat, like_BV).bincount(minlength=like_BV.numel()).view(like_BV.shape)


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


# ---- scores -> probabilities -> tokens -----------------------------------------------------------------------------


def probabilities(scores_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[B, V]: softmax at each row's temperature, then exactly the k likeliest, then the fewest of them that hold
    `top_p` of what is left, then those with a share `min_p` of the likeliest one's; the rest is 0. Of equals the lower
    id goes first."""
    v = scores_BV.shape[-1]
    scores = (scores_BV - scores_BV.amax(-1, keepdim=True)) / _column([s.temperature for s in samplings], scores_BV)
    k = [s.top_k if 0 < s.top_k < v else v for s in samplings]
    if min(k) < v:
        scores = _keep_largest(scores, _index(k, scores))
    if any(0 < s.top_p < 1 for s in samplings):
        target = _column([s.top_p if 0 < s.top_p < 1 else 2.0 for s in samplings], scores)
        scores = _keep_largest(scores, _nucleus(torch.softmax(scores, -1), target))
    if any(s.min_p > 0 for s in samplings):
        floor = _column([s.min_p for s in samplings], scores).log()  # of 0: -inf
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return torch.softmax(scores, -1)


def _nucleus(p_BV: Tensor, target_B1: Tensor) -> Tensor:
    """[B]: how many of the likeliest tokens hold the target; all for a target above 1."""
    v = p_BV.shape[-1]
    for count in (min(LIKELY, v), v):
        sorted_p = p_BV.topk(count, -1).values
        held = sorted_p.cumsum(-1)
        if count == v or bool(((held[:, -1:] >= target_B1) | (target_B1 > 1)).all()):
            break
    number = (held - sorted_p < target_B1).sum(-1)
    return number.masked_fill(target_B1[:, 0] > 1, v)


def _keep_largest(scores_BV: Tensor, count_B: Tensor) -> Tensor:
    """Exactly `count_B` scores of each row stay, the rest becomes -inf; of equals the lower id goes first."""
    v = scores_BV.shape[-1]
    cut = count_B < v
    most = int(torch.where(cut, count_B, 1).max())
    last = scores_BV.topk(most, -1).values.gather(-1, (count_B.clamp(max=most) - 1)[:, None])
    above, equal = scores_BV > last, scores_BV == last
    wanted = count_B[:, None] - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= wanted)) | ~cut[:, None]
    return scores_BV.masked_fill(~keep, -torch.inf)


def draw(p_BV: Tensor, drawn_B: Tensor) -> Tensor:
    """[B]: the token in whose share of [0, 1) the number falls; shares lie in the order of ids.

    In that order rounding moves the borders by a rounding, while in the order of probabilities two tokens of nearly the
    same probability could change places.
    """
    shares = p_BV.cumsum(-1)
    target = drawn_B[:, None] * shares[:, -1:]
    found = torch.searchsorted(shares, target, right=True)[:, 0].clamp(max=p_BV.shape[-1] - 1)
    # beyond the last share by a rounding: the last token that has any
    last = p_BV.shape[-1] - 1 - (p_BV.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)
