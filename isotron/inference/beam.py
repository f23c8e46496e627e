"""Beam search: the sequences with the highest probability that keeping `count` of them at each length finds.

Legend: W beams at work, V vocabulary. Beams share pages of the cache; a page that two of them would write is copied
first. Score of an answer: the sum of its log-probabilities (after penalties and biases) over its length to the power of
`length_penalty`. Among the likeliest continuations of all beams, those that end a sequence are finished when they stand
among the first `count`; the first `count` others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isotron.core.errors import Refused
from isotron.inference.checks import check_request
from isotron.inference.config import Beams, Wish
from isotron.inference.engine import Engine
from isotron.inference.pages import Pages
from isotron.inference.plan import Span
from isotron.inference.row import Row
from isotron.inference.sampling import Draw, adjusted


@dataclass
class _Beam:
    tokens: list[int]
    table: list[int]
    held: int = 0
    score: float = 0.0
    logprobs: list[float] = field(default_factory=list)


def search(engine: Engine, prompts: Sequence[Sequence[int]], wish: Wish, beams: Beams) -> list[list[Row]]:
    """Per prompt its `wish.n` best answers, the best first. Every rank makes the same call."""
    problems = beams.problems(wish)
    if problems:
        raise Refused(problems)
    greedy = wish if wish.n == 1 and not wish.best_of else Wish(wish.sampling, wish.ending, tops=wish.tops)
    check_request(engine.model.config, prompts, greedy)
    found = []
    for number, prompt in enumerate(prompts):
        page = engine.config.page
        longest = -(-(len(prompt) + wish.ending.max_new_tokens) // page) * page
        with engine.opened(longest * (beams.count + 1) + 2 * beams.count * page):  # and the pages that are copied
            found.append(_Search(engine, list(prompt), wish, beams, number).run()[: wish.n])
    return found


class _Search:
    """The search for one prompt."""

    def __init__(self, engine: Engine, prompt: list[int], wish: Wish, beams: Beams, number: int) -> None:
        self.engine, self.prompt, self.wish, self.beams, self.number = engine, prompt, wish, beams, number
        self.pages: Pages = engine.at_work.pages
        self.finished: list[tuple[float, _Beam, str]] = []

    @torch.inference_mode()
    def run(self) -> list[Row]:
        """All answers that were finished, best first."""
        going = [_Beam(self.prompt, [])]
        for length in range(1, self.wish.ending.max_new_tokens + 1):
            last = length == self.wish.ending.max_new_tokens
            going = self._extended(going, length, last)
            if last or not going or self._settled(going[0].score, length):
                break
        return [self._row(beam, reason) for _, beam, reason in self.finished]

    def _extended(self, going: list[_Beam], length: int, last: bool) -> list[_Beam]:
        """The beams one token later; those that end are sorted into `finished`."""
        stops, count = self.wish.ending.stop_ids, self.beams.count
        chosen: list[tuple[_Beam, int, float, float]] = []
        for rank, (parent, token, score, own) in enumerate(self._continuations(going)):
            ends = token in stops
            if (ends or last) and rank < count:
                beam = _Beam([*parent.tokens, token], [], 0, score, [*parent.logprobs, own])
                self.finished.append((score / length**self.beams.length_penalty, beam, "stop" if ends else "length"))
            elif not ends and not last and len(chosen) < count:
                chosen.append((parent, token, score, own))
        self.finished = sorted(self.finished, key=lambda f: -f[0])[:count]
        return self._forked(going, chosen)

    def _continuations(self, going: list[_Beam]) -> list[tuple[_Beam, int, float, float]]:
        """The likeliest (beam, token, score, own log-probability), best first; the same on every rank."""
        keep = max(2, 1 + len(self.wish.ending.stop_ids)) * self.beams.count
        logits = self._logits(going)
        vocab = self.engine.model.config.vocab_size
        keep = min(keep, len(going) * vocab)
        told = torch.empty(3, keep, dtype=torch.float64, device=self.engine.model.device)
        if logits is not None and self.engine.runner.decides:
            told[0], told[1], told[2] = self._best(logits, going, keep)
        index, scores, own = self.engine.runner.tell(told).tolist()
        return [
            (going[int(i) // vocab], int(i) % vocab, s, o)
            for i, s, o in zip(index, scores, own, strict=True)
            if s > -torch.inf
        ]

    def _best(self, logits_WV: Tensor, going: list[_Beam], keep: int) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_WV = torch.log_softmax(logits_WV.double(), -1)
        draws = [Draw(self.wish.sampling, self.number, b.tokens, len(self.prompt)) for b in going]
        scores = adjusted(logprobs_WV.clone(), draws) if self.wish.sampling.adjusts else logprobs_WV
        before = torch.tensor([b.score for b in going], dtype=torch.float64, device=logits_WV.device)
        values, index = (scores + before[:, None]).flatten().topk(keep)
        return index, values, logprobs_WV.flatten()[index]

    def _logits(self, going: list[_Beam]) -> Tensor | None:
        """Of each beam's last token, all its tokens cached afterwards."""
        for beam in going:
            more = self.pages.needed(len(beam.tokens)) - len(beam.table)
            beam.table = [*beam.table, *self.pages.take(max(0, more))]
        chunk, begins = self.engine.config.chunk, self.engine.runner.stretch_begins
        while True:
            spans = []
            for b in going:
                long = bool(begins) and len(b.tokens) > begins
                b.held = 0 if begins and len(b.tokens) == begins + 1 and b.held == begins else b.held
                spans.append(Span(b.tokens, b.table, b.held, min(chunk, len(b.tokens) - b.held), long))
            ready = all(s.end == len(s.tokens) for s in spans)
            logits = self.engine.runner.run(spans, [int(ready)] * len(spans))
            for b, s in zip(going, spans, strict=True):
                b.held = s.end
            if ready:
                return logits

    def _forked(self, going: list[_Beam], chosen: list[tuple[_Beam, int, float, float]]) -> list[_Beam]:
        """Beams with tables of their own: full pages are shared, a page that is not full is copied."""
        cache, size = self.engine.runner.cache, self.pages.size
        made = []
        for parent, token, score, own in chosen:
            full = parent.held // size
            table = self.pages.share(parent.table[:full])
            if parent.held % size and cache is not None:
                (page,) = self.pages.take(1)
                cache.copy_page(parent.table[full], page)
                table.append(page)
            made.append(_Beam([*parent.tokens, token], table, parent.held, score, [*parent.logprobs, own]))
        for beam in going:
            self.pages.give_back(beam.table)
        return made

    def _settled(self, best: float, length: int) -> bool:
        """Whether the beams at work cannot change the result."""
        if len(self.finished) < self.beams.count:
            return False
        return self.beams.early_stopping or best / length**self.beams.length_penalty <= self.finished[-1][0]

    def _row(self, beam: _Beam, reason: str) -> Row:
        row = Row(beam.tokens, len(self.prompt), self.wish, self.number, logprobs=beam.logprobs)
        row.reason = reason
        return row
