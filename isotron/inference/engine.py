"""Generation from a model in a layout: prompts in, new tokens out, the same tokens in every layout.

    engine = Engine(model, tokenizer)        # on every rank
    out = engine.generate([[5, 7], [1]], max_new_tokens=20)

or, for requests that come and go:

    with engine.opened(cache_tokens=65536):
        rows = engine.add([5, 7], Wish(ending=Ending(20)))
        while not engine.idle:
            engine.step()                    # one pass; every row that could go on has grown

Legend: O tokens whose logits a pass gives, V vocabulary. All ranks hold the same rows and plan the same passes; the
last stage's first rank chooses each token and all ranks are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isotron.core.errors import Problem, Refused, refuse
from isotron.core.parallel.model import ParallelModel
from isotron.inference.checks import check_model, check_request
from isotron.inference.config import Ending, EngineConfig, Sampling, Wish
from isotron.inference.grammar import Grammar, Grammars
from isotron.inference.heads import FromHeads
from isotron.inference.pages import Pages
from isotron.inference.plan import Span
from isotron.inference.row import Row
from isotron.inference.runner import Runner
from isotron.inference.sampling import NOT_A_TOKEN, Draw, choose, likeliest, own_logprobs
from isotron.inference.scheduler import Scheduler, Work
from isotron.inference.speculate import FromDraft, FromText, Guesser, accepted
from isotron.inference.text import Text
from isotron.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Generated:
    """Per answer, in the order of the prompts: the new tokens (a stop token included), the model's log-probability of
    each (nats, at temperature 1 over the whole vocabulary), and why the answer ended: "stop" or "length"."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class Engine:
    """Generates with a model in an `inference_layout`, or in that of a training run without data parallelism, chunks
    and sequence parallelism; the model can be trained on afterwards. Every rank makes the same calls.

    `draft`: a smaller model in the same layout with the same vocabulary, for `config.speculate` "draft".
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        draft: ParallelModel | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        check_model(model)
        _check_config(self.config, model, draft)
        self.model, self.tokenizer, self.draft = model, tokenizer, draft
        self.runner = Runner(model)
        self.scheduler: Scheduler | None = None
        self.guesser: Guesser | None = None
        self.accepted, self.guessed = 0, 0
        self._grammars: Grammars | None = None

    # ---- requests that come and go ---------------------------------------------------------------------------------

    @contextmanager
    def opened(self, cache_tokens: int) -> Iterator[None]:
        """Inside, requests can be added and steps made, with an empty cache of this many tokens (whole pages)."""
        count = -(-cache_tokens // self.config.page)
        pages = Pages(count, self.config.page, self.config.reuse)
        with ExitStack() as stack:
            stack.enter_context(self.runner.opened(count, self.config.page))
            if self.config.speculate == "draft" and self.draft is not None:
                draft = Runner(self.draft)
                stack.enter_context(draft.opened(count, self.config.page))
                self.guesser = FromDraft(draft, self._decide_guesses, self.runner.stretch_begins)
            elif self.config.speculate == "mtp":
                self.guesser = FromHeads(self.runner, self._decide_guesses, self.runner.stretch_begins)
            elif self.config.speculate == "ngram":
                self.guesser = FromText(self.runner.stretch_begins)
            elif self.config.speculate == "auto":
                self.guesser = FromText(self.runner.stretch_begins, weighs=True)
            self.scheduler = Scheduler(pages, self.config, self.runner.stretch_begins)
            try:
                yield
            finally:
                self.scheduler = self.guesser = self.runner.outputs = None
                self.runner.keeps_outputs = False

    @property
    def at_work(self) -> Scheduler:
        """The scheduler of an engine that is open."""
        if self.scheduler is None:
            raise RuntimeError("requests are taken inside Engine.opened")
        return self.scheduler

    @property
    def idle(self) -> bool:
        """Whether every row has ended."""
        return self.at_work.idle

    def check(self, prompt: Sequence[int], wish: Wish) -> None:
        """Refuses a request that can never be served."""
        check_request(self.model.config, [list(prompt)], wish)
        pages = self.at_work.pages
        if pages.needed(len(prompt) + wish.ending.max_new_tokens) > pages.count:
            room = pages.count * pages.size - len(prompt)
            raise refuse(
                f"--max-new-tokens {wish.ending.max_new_tokens} after a prompt of {len(prompt)} tokens",
                f"the cache holds {pages.count * pages.size} tokens",
                f"--max-new-tokens {room}" if room > 0 else "a shorter prompt, or a larger --cache-tokens",
            )

    def add(self, prompt: Sequence[int], wish: Wish, request: int = 0, watch_text: bool = False) -> list[Row]:
        """The rows of a request: `wish.samples` of them, each growing by `step` until it has a `reason`."""
        tokens = list(prompt) or self._beginning(request)
        self.check(tokens, wish)
        rows: list[Row] = []
        for sample in range(wish.samples):
            row = Row(list(tokens), len(tokens), wish, request, sample, leader=rows[0] if rows else None)
            if wish.ending.stop or watch_text:
                row.text = Text(self._need_tokenizer("stop texts"), tokens, wish.ending.stop)
            if wish.grammar is not None:
                row.grammar = self.grammar(*wish.grammar)
            rows.append(row)
        self.at_work.add(rows)
        return rows

    def grammar(self, kind: str, text: str) -> Grammar:
        """A grammar for the tokenizer of this engine; refuses what cannot be read."""
        if self._grammars is None:
            self._grammars = Grammars(self._need_tokenizer("a grammar"), self.model.config.vocab_size)
        return self._grammars.make(kind, text)

    def cancel(self, row: Row) -> None:
        """End a row now; its pages are free for others."""
        self.at_work.drop(row, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """One pass; the rows that got a token or ended."""
        scheduler = self.at_work
        scheduler.restart_stretched()
        scheduler.admit()
        if self.guesser is not None:
            self.guesser.guess([r for r in scheduler.running if r.ready], self.config.most_guesses)
        work = scheduler.plan()
        spans = [self._span(w) for w in work]
        logits = self.runner.run(spans, [w.wanted for w in work])
        if self.guesser is not None:
            self.guesser.saw([w.row for w in work], spans)
        grown = [w for w in work if w.wanted]
        draws = [d for w in grown for d in draws_of(w, self.runner.decides)]
        told = self._told(logits, draws, [w.row.wish for w in grown for _ in range(w.wanted)])
        for w in work:
            if not w.wanted:
                self._hold(w.row, w.row.held + w.count)
        at = 0
        for w in grown:
            self._grow(w, told[at : at + w.wanted])
            at += w.wanted
        for w in grown:
            if w.row.reason:
                scheduler.leave(w.row)
        return [w.row for w in grown]

    def _span(self, work: Work) -> Span:
        row = work.row
        tokens = row.tokens + row.guesses if row.guesses else row.tokens
        return Span(tokens, row.table, row.held, work.count, bool(row.salt))

    def _hold(self, row: Row, held: int) -> None:
        """The first `held` tokens are in the cache now."""
        self.at_work.pages.publish(row.tokens, row.table, row.held, held, row.salt)
        row.held = held

    def _grow(self, work: Work, told: list[_Told]) -> None:
        """Append what was chosen, as far as the guesses before it were right."""
        row, guesses = work.row, work.row.guesses
        right = accepted(guesses, [t.token for t in told])
        self.guessed += len(guesses)
        self.accepted += right
        held = len(row.tokens) + right
        for one in told[: right + 1]:
            row.emit(one.token, one.logprob, one.tops)
            if row.reason:
                break
        row.luck.saw(len(guesses), right)
        row.guesses = []
        self._hold(row, min(held, len(row.tokens)))

    # ---- choosing --------------------------------------------------------------------------------------------------

    def _told(self, logits: Tensor | None, draws: list[Draw], wishes: list[Wish]) -> list[_Told]:
        """What was chosen for each row of logits, known on every rank."""
        if not draws:
            return []
        logprobs, tops = any(w.logprobs for w in wishes), max(w.tops for w in wishes)
        columns = 1 + logprobs + 2 * tops
        told = torch.empty(len(draws), columns, dtype=torch.float64, device=self.model.device)
        if logits is not None and self.runner.decides:
            tokens = choose(logits, draws)
            told[:, 0] = tokens
            if logprobs:
                told[:, 1] = own_logprobs(logits, tokens)
            if tops:
                told[:, 2 : 2 + tops], told[:, 2 + tops :] = likeliest(logits, tops)
        rows = self.runner.tell(told).tolist()
        return [_read_told(row, wish, tops) for row, wish in zip(rows, wishes, strict=True)]

    def _decide_guesses(self, logits: Tensor | None, rows: list[tuple[Row, list[int]]]) -> list[int]:
        """Tokens that the draft model chooses, by the draws of the model itself."""
        told = torch.empty(len(rows), dtype=torch.long, device=self.model.device)
        if logits is not None and self.runner.decides:
            told[:] = choose(logits, [_draw(row, history) for row, history in rows])
        return self.runner.tell(told).tolist()

    # ---- whole batches ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 0.0,
        seed: int = 1234,
        stop_ids: Sequence[int] | None = None,
        first_request: int = 0,
    ) -> Generated:
        """Continue each prompt by at most `max_new_tokens` tokens, or until one of `stop_ids`.

        `stop_ids` None: the tokenizer's end of document; (): never. An empty prompt begins at the end of a document.
        Row i draws as request `first_request` + i, whatever else is in the batch. Refuses rows longer than the model.
        """
        stops = frozenset(self._ends() if stop_ids is None else stop_ids)
        wish = Wish(Sampling(temperature, top_k, top_p, seed), Ending(max_new_tokens, stops))
        rows = [row for answers in self.answer(prompts, wish, first_request) for row in answers]
        return Generated([r.new for r in rows], [r.logprobs for r in rows], [r.reason for r in rows])

    def answer(self, prompts: Sequence[Sequence[int]], wish: Wish, first_request: int = 0) -> list[list[Row]]:
        """Per prompt its `wish.n` best answers, the likeliest first where several were generated.

        Begins with an empty cache that is given back at the end. Logits that are not finite are refused.
        """
        given = [list(prompt) or self._beginning(i) for i, prompt in enumerate(prompts)]
        check_request(self.model.config, given, wish)
        if not given:
            return []
        with self.opened(self._enough(given, wish)):
            answers = [self.add(prompt, wish, first_request + i) for i, prompt in enumerate(given)]
            while not self.idle:
                if any(row.reason == "error" for row in self.step()):
                    refuse_errors(answers)
        return [best(rows, wish.n) for rows in answers]

    def _enough(self, prompts: Sequence[Sequence[int]], wish: Wish) -> int:
        """Tokens of cache with which as many rows as may be at work find room."""
        page = self.config.page
        sizes = [-(-(len(p) + wish.ending.max_new_tokens) // page) * page for p in prompts for _ in range(wish.samples)]
        return sum(sorted(sizes)[-self.config.rows :])

    # ---- ends of documents -----------------------------------------------------------------------------------------

    def _ends(self) -> set[int]:
        if self.tokenizer is None:
            return set()
        return {i for i in (self.tokenizer.eod, self.tokenizer.eos) if i is not None}

    def ends(self, named: Sequence[int] | None = None) -> frozenset[int]:
        """The tokens that end a document: those that a model names, else the tokenizer's."""
        return frozenset(named or self._ends())

    def _beginning(self, row: int) -> list[int]:
        if self.tokenizer is None:
            raise refuse(
                f"prompt {row} without any token",
                "an empty prompt begins at the end of a document, and without a tokenizer that token is unknown",
                "a prompt of one token or more, or Engine(model, tokenizer)",
            )
        return [self.tokenizer.eod]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise refuse(f"{what} without a tokenizer", "it turns tokens into text", "Engine(model, tokenizer)")
        return self.tokenizer


@dataclass(frozen=True)
class _Told:
    """What was chosen at one place."""

    token: int
    logprob: float | None
    tops: list[tuple[int, float]]


def _read_told(values: list[float], wish: Wish, tops: int) -> _Told:
    logprob = values[1] if wish.logprobs else None
    pairs = zip(values[2 : 2 + wish.tops], values[2 + tops : 2 + tops + wish.tops], strict=True)
    return _Told(int(values[0]), logprob, [(int(i), p) for i, p in pairs])


def _draw(row: Row, history: Sequence[int]) -> Draw:
    return Draw(row.wish.sampling, row.request, history, row.prompt, row.sample)


def draws_of(work: Work, decides: bool) -> list[Draw]:
    """What the choices of a row in a pass depend on; grammars are looked at where it is decided."""
    row = work.row
    if row.grammar is not None and decides:
        return [replace(_draw(row, row.tokens), allowed=row.grammar.allowed())]
    if not row.guesses:
        return [_draw(row, row.tokens)]
    return [_draw(row, row.tokens + row.guesses[:i]) for i in range(work.wanted)]


def best(rows: list[Row], count: int) -> list[Row]:
    """The `count` answers with the highest mean log-probability, the likeliest first; all of them in the order in which
    they were drawn when there are no more."""
    if len(rows) == count:
        return rows
    return sorted(rows, key=lambda r: -sum(r.logprobs) / max(1, len(r.logprobs)))[:count]


def refuse_errors(answers: Sequence[Sequence[Row]]) -> None:
    """Refuse answers that ended because the logits were no numbers."""
    for i, rows in enumerate(answers):
        for row in rows:
            if row.reason == "error":
                raise refuse(
                    f"generate token {len(row.tokens)} of prompt {i}",
                    "the model gives logits that are not finite numbers",
                    "--dtype float32 if this was a narrower type; else load an earlier step, this one may have "
                    "diverged",
                    exit_code=1,
                )


def _check_config(config: EngineConfig, model: ParallelModel, draft: ParallelModel | None) -> None:
    problems = config.problems()
    if config.speculate == "draft" and draft is None:
        asked = "--speculate draft without a draft model"
        problems.append(Problem(asked, "it guesses the tokens", "--draft DIR with a smaller model"))
    if config.speculate == "mtp" and not getattr(model.config, "mtp_num_layers", 0):
        case = "the model has no module for tokens further ahead (mtp_num_layers)"
        problems.append(Problem("--speculate mtp", case, "--speculate ngram"))
    if draft is not None:
        check_model(draft)
        if draft.config.vocab_size != model.config.vocab_size:
            asked = f"a draft model with {draft.config.vocab_size} tokens"
            case = f"the model has {model.config.vocab_size}, and both must mean the same tokens"
            problems.append(Problem(asked, case, "--draft with a model of the same tokenizer"))
    if problems:
        raise Refused(problems)


__all__ = ["NOT_A_TOKEN", "Engine", "Generated", "best", "draws_of", "refuse_errors"]
