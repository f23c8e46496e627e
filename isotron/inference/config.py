"""Options of generation: how tokens are chosen, when a sequence ends, and how the cache is laid out. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from isotron.core.errors import Problem
from isotron.core.parallel.plan import Layout

# more would be a typing error that keeps the machine, or its memory, busy before anyone could say so
MOST_ROWS, MOST_TOKENS, MOST_BEAMS = 2**16, 2**20, 1024
MOST_PENALTY = 10  # beyond it the score of a long answer is no number


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the cuts are made in the order of the fields.

    repetition_penalty divides what speaks for tokens of the prompt or of the answer; presence_penalty and
    frequency_penalty are subtracted from tokens of the answer, once or per occurrence; logit_bias is added per token.
    temperature: 0 takes the likeliest token. top_k: draw from the k likeliest, 0 means all. top_p: draw from the
    likeliest that hold this probability, 0 or 1 means all. min_p: only from tokens with at least this share of the
    likeliest one's probability. seed: other seeds draw other tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 1234
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether logits change before anything is chosen."""
        return bool(self.logit_bias) or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def problems(self) -> list[Problem]:
        """Every value out of range."""
        finite = math.isfinite
        rules = (
            ("--temperature", self.temperature, finite(self.temperature) and self.temperature >= 0,
             "the temperature must be a number of 0 or more", "--temperature 0 (greedy) or --temperature 1"),
            ("--top-k", self.top_k, self.top_k >= 0,
             "top_k must be 0 (all tokens) or more", "--top-k 0"),
            ("--top-p", self.top_p, 0 <= self.top_p <= 1,
             "top_p is a probability between 0 and 1 (0 and 1: all tokens)", "--top-p 0.9"),
            ("--min-p", self.min_p, 0 <= self.min_p <= 1,
             "min_p is a share between 0 (all tokens) and 1", "--min-p 0.05"),
            ("--repetition-penalty", self.repetition_penalty,
             finite(self.repetition_penalty) and self.repetition_penalty > 0,
             "it divides logits, so it must be above 0 (1: no penalty)", "--repetition-penalty 1.1"),
            ("--presence-penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2,
             "it must be between -2 and 2 (0: no penalty)", "--presence-penalty 0.5"),
            ("--frequency-penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2,
             "it must be between -2 and 2 (0: no penalty)", "--frequency-penalty 0.5"),
            ("--logit-bias", dict(self.logit_bias), all(abs(b) <= 100 for _, b in self.logit_bias),
             "every bias must be between -100 and 100", "--logit-bias 50256:-100"),
        )  # fmt: skip
        return [Problem(f"{name} {value}", case, fix) for name, value, fine, case, fix in rules if not fine]


@dataclass(frozen=True)
class Ending:
    """When a sequence ends: after `max_new_tokens`, at one of `stop_ids` (kept in the tokens, not in the text), or
    before one of the texts `stop`."""

    max_new_tokens: int = 64
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    def problems(self) -> list[Problem]:
        """Every value out of range."""
        rules = (
            (f"--max-new-tokens {self.max_new_tokens}", self.max_new_tokens >= 1,
             "max_new_tokens must be 1 or more", "--max-new-tokens 64"),
            ("--stop with an empty text", all(self.stop), "every text contains it", "--stop with the text to stop at"),
        )  # fmt: skip
        return [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]


@dataclass(frozen=True)
class EngineConfig:
    """rows: sequences at work at once. page: tokens of a page of the cache. chunk: tokens of one pass, beyond which
    prompts wait for the next. reuse: sequences with the same beginning share its pages. lookahead: tokens guessed
    ahead by `speculate` (auto, none, ngram, draft, mtp); 0: up to 7 by auto, 4 by the others."""

    rows: int = 32
    page: int = 64
    chunk: int = 512
    reuse: bool = True
    speculate: str = "auto"
    lookahead: int = 0

    @property
    def most_guesses(self) -> int:
        """Tokens guessed ahead of a row."""
        return self.lookahead or (7 if self.speculate == "auto" else 4)

    def problems(self) -> list[Problem]:
        """Every value out of range."""
        kinds = ("auto", "none", "ngram", "draft", "mtp")
        rules = (
            (f"--max-batch {self.rows}", 1 <= self.rows <= MOST_ROWS,
             f"at least one sequence is at work, and at most {MOST_ROWS}", "--max-batch 32"),
            (f"--page {self.page}", 1 <= self.page <= MOST_ROWS,
             f"a page holds one token or more, at most {MOST_ROWS}", "--page 64"),
            (f"--chunk {self.chunk}", 1 <= self.chunk <= MOST_TOKENS,
             f"a pass takes one token or more, at most {MOST_TOKENS}", "--chunk 512"),
            (f"--speculate {self.speculate}", self.speculate in kinds, f"it is one of {', '.join(kinds)}",
             "--speculate ngram"),
            (f"--lookahead {self.lookahead}", 0 <= self.lookahead <= 7,
             "1 to 7 tokens can be guessed ahead; 0 leaves the number to the kind",
             "--lookahead 4"),
        )  # fmt: skip
        return [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]


@dataclass(frozen=True)
class Wish:
    """One request: how to choose, when to end, how many answers (`n`, the likeliest of `best_of`), how many
    alternatives per token to report (`tops`), whether to report log-probabilities, and a grammar that the answer must
    follow: ("json_schema", text), ("json", "") or ("regex", text)."""

    sampling: Sampling = field(default_factory=Sampling)
    ending: Ending = field(default_factory=Ending)
    n: int = 1
    best_of: int = 0
    logprobs: bool = True
    tops: int = 0
    grammar: tuple[str, str] | None = None

    @property
    def samples(self) -> int:
        """Sequences that are generated for it."""
        return max(self.n, self.best_of)

    def problems(self) -> list[Problem]:
        """Every value out of range."""
        rules = (
            (f"--n {self.n} --best-of {self.best_of}", self.n >= 1 and self.samples <= MOST_ROWS,
             f"at least one answer is asked for, and at most {MOST_ROWS}", "--n 1 --best-of 0"),
            (f"--best-of {self.best_of} --n {self.n}", self.best_of == 0 or self.best_of >= self.n,
             "the best n are taken of best_of, so it cannot be smaller", f"--best-of {self.n}"),
            (f"--logprobs {self.tops}", 0 <= self.tops <= 20, "0 to 20 alternatives are reported", "--logprobs 5"),
            (f"--n {self.samples} at --temperature 0", self.samples == 1 or self.sampling.temperature > 0,
             "the likeliest token is the same in every answer", "--temperature 1, or --num-beams for several"),
        )  # fmt: skip
        own = [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]
        return [*self.sampling.problems(), *self.ending.problems(), *own]


def inference_layout(layout: Layout) -> Layout:
    """The layout for generation: tp, pp and padding as given, and nothing that only training needs.

    A generation has one token per step and no backward: sequence parallelism, recompute, schedules, chunks and
    data-parallel replicas have no place in it, and layers are dealt evenly. The few tokens of a pass are at hand on all
    tensor-parallel ranks, so experts are not sent any.
    """
    return replace(
        layout,
        dp=1,
        vpp=1,
        sequence_parallel=False,
        zero=0,
        moe_token_dispatcher_type="allgather",
        schedule="auto",
        schedule_memory=0.0,
        microbatch_group=0,
        layer_split="even",
        pipeline_layout="",
        layers_per_stage=(),
        first_stage_layers=0,
        last_stage_layers=0,
        recompute="none",
        recompute_num_layers=1,
        recompute_keep=0,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )


@dataclass(frozen=True)
class Beams:
    """count: beams. length_penalty: above 0 favours long answers. early_stopping: end as soon as `count` answers are
    finished, else when no beam at its present length could be better than the worst of them."""

    count: int = 4
    length_penalty: float = 1.0
    early_stopping: bool = False

    def problems(self, wish: Wish) -> list[Problem]:
        """Every value that does not fit."""
        rules = (
            (f"--num-beams {self.count}", 1 <= self.count <= MOST_BEAMS,
             f"at least one beam is kept, and at most {MOST_BEAMS}", "--num-beams 4"),
            (f"--length-penalty {self.length_penalty}", abs(self.length_penalty) <= MOST_PENALTY,
             f"scores are divided by length to this power, at most {MOST_PENALTY}", "--length-penalty 1"),
            (f"--n {wish.n} --num-beams {self.count}", wish.n <= self.count,
             "the n best answers are taken of the beams", f"--num-beams {wish.n}"),
            (f"--num-beams {self.count} --temperature {wish.sampling.temperature}", wish.sampling.temperature == 0,
             "beam search draws nothing", "--temperature 0"),
            (f"--num-beams {self.count} with --stop, --json-schema or --regex",
             not wish.ending.stop and wish.grammar is None, "beams end at tokens", "--stop-ids"),
        )  # fmt: skip
        return [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]
