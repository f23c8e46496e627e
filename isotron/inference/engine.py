"""Generation from a model in a layout: prompts in, new tokens out, the same tokens in every layout.

    engine = Engine(model, tokenizer)        # on every rank
    out = engine.generate([[5, 7], [1]], max_new_tokens=20)

Legend: B rows (one per prompt), S tokens of the pass, D hidden, V vocabulary. The first pass takes all prompts, padded
on the right; every later pass takes one token per row. Pipeline stages run in turn; the last stage's first rank decides
each token and all ranks are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.errors import refuse
from isotron.core.mesh import AXES, rank_of
from isotron.core.parallel.model import ParallelModel
from isotron.inference.cache import Cache, cached
from isotron.inference.checks import check_model, check_request
from isotron.inference.config import Sampling
from isotron.inference.sampling import NOT_A_TOKEN, choose
from isotron.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Generated:
    """Per prompt: the new tokens (a stop token included), the model's log-probability of each (nats, at temperature 1
    over the whole vocabulary), and why the row ended: "stop" or "length"."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def joined(self, other: Generated) -> Generated:
        """These rows and the other's."""
        return Generated(self.tokens + other.tokens, self.logprobs + other.logprobs, self.reasons + other.reasons)


class Engine:
    """Generates with a model in an `inference_layout`, or in that of a training run without data parallelism, chunks
    and sequence parallelism; the model can be trained on afterwards. Every rank makes the same calls."""

    def __init__(self, model: ParallelModel, tokenizer: Tokenizer | None = None) -> None:
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.mesh = model.mesh
        (self.stage,) = model.stages.values()
        self.world = self.mesh.group(*AXES)
        last = {"tp": 0, "cp": 0, "dp": 0, "pp": self.mesh.sizes["pp"] - 1}
        self.decider = self.world.ranks.index(rank_of(last, self.mesh.sizes))

    @torch.no_grad()
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
        sampling = Sampling(temperature, top_k, top_p, seed)
        rows = [list(prompt) or self._beginning(i) for i, prompt in enumerate(prompts)]
        check_request(self.model.config, rows, max_new_tokens, sampling)
        if not rows:
            return Generated()
        stops = frozenset(self._ends() if stop_ids is None else stop_ids)
        self.model.wait_weights()
        # one rotation serves a whole batch: rows that change theirs at different times go one by one
        alone = len(set(map(len, rows))) > 1 and self._long_rotation(max(map(len, rows)) + max_new_tokens)
        result = Generated()
        for start, part in enumerate([[row] for row in rows]) if alone else [(0, rows)]:
            result = result.joined(self._batch(part, stops, max_new_tokens, sampling, first_request + start))
        return result

    def _batch(
        self, rows: list[list[int]], stops: frozenset[int], max_new_tokens: int, sampling: Sampling, first_request: int
    ) -> Generated:
        """Rows that grow together."""
        found = _Rows(rows, stops, max_new_tokens)
        with cached(self.stage.module, len(rows), found.longest + max_new_tokens) as cache:
            while not found.done:
                cache.begin_anew_if(self._long_rotation(found.longest))
                logits_BV = self._forward(found, cache)
                places = [(first_request + i, len(row)) for i, row in enumerate(found.rows)]
                found.append(*self._decide(logits_BV, sampling, places))
        return found.result()

    def _long_rotation(self, length: int) -> bool:
        """Whether a sequence of this length is rotated by other frequencies than a short one."""
        cfg = self.model.config
        if getattr(cfg, "rope_scaling", "none") != "longrope":
            return False
        return length > (cfg.rope_original_positions or cfg.max_position_embeddings)

    # ---- one pass --------------------------------------------------------------------------------------------------

    def _forward(self, found: _Rows, cache: Cache) -> Tensor | None:
        """Logits [B, V] for each row's next token, on the ranks of the last stage."""
        batch, last_B = _first_pass(found.rows) if cache.empty else _next_pass(found)
        batch, last_B = batch.to(self.model.device), last_B.to(self.model.device)
        cache.begin(batch.positions, found.longest)
        module: Any = self.stage.module
        x_BSD = module.hidden(batch, self._receive(batch))
        cache.end()
        if not module.is_last:
            self._send(x_BSD)
            return None
        ends_B1D = x_BSD[torch.arange(len(last_B), device=x_BSD.device), last_B][:, None]
        return self._whole_vocabulary(module.head.logits(module.norm(ends_B1D))[:, 0])

    def _receive(self, batch: Batch) -> dict[str, Tensor]:
        """What the stage before sends; nothing on the first stage."""
        group = self.mesh.group("pp")
        if group.index == 0:
            return {}
        boundary = {}
        for name, (shape, dtype) in sorted(self.stage.boundary_shapes(batch.shape).items()):
            space = torch.empty(shape, dtype=dtype, device=self.model.device)
            (pending,) = comm.exchange([], [(space, group.ranks[group.index - 1])], group)
            boundary[name] = pending.wait()
        return boundary

    def _send(self, x_BSD: Tensor) -> None:
        group = self.mesh.group("pp")
        (pending,) = comm.exchange([(x_BSD.contiguous(), group.ranks[group.index + 1])], [], group)
        pending.wait()

    def _whole_vocabulary(self, local: Tensor) -> Tensor:
        """[B, V]: every rank's columns, without the padding; every rank holds equally many, real or padding."""
        head: Any = self.stage.module.head
        held = head.weight.shape[0]
        if local.shape[-1] < held:
            local = torch.nn.functional.pad(local, (0, held - local.shape[-1]))
        full = comm.all_gather(local, self.mesh.group("tp"), 1)
        return full[:, : self.model.config.vocab_size]

    def _decide(
        self, logits_BV: Tensor | None, sampling: Sampling, places: list[tuple[int, int]]
    ) -> tuple[list[int], list[float]]:
        """The next token of each row and its log-probability, decided once and told to all ranks."""
        told = torch.empty(2, len(places), dtype=torch.float64, device=self.model.device)
        if logits_BV is not None and self.world.index == self.decider:
            told[0], told[1] = choose(logits_BV, sampling, places)
        tokens, logprobs = comm.broadcast(told, self.world, self.decider).tolist()
        if NOT_A_TOKEN in tokens:
            raise refuse(
                f"generate token {places[tokens.index(NOT_A_TOKEN)][1]} of prompt {tokens.index(NOT_A_TOKEN)}",
                "the model gives logits that are not finite numbers",
                "--dtype float32 if this was a narrower type; else load an earlier step, this one may have diverged",
                exit_code=1,
            )
        return [int(t) for t in tokens], logprobs

    # ---- ends of documents -----------------------------------------------------------------------------------------

    def _ends(self) -> set[int]:
        if self.tokenizer is None:
            return set()
        return {i for i in (self.tokenizer.eod, self.tokenizer.eos) if i is not None}

    def _beginning(self, row: int) -> list[int]:
        if self.tokenizer is None:
            raise refuse(
                f"prompt {row} without any token",
                "an empty prompt begins at the end of a document, and without a tokenizer that token is unknown",
                "a prompt of one token or more, or Engine(model, tokenizer)",
            )
        return [self.tokenizer.eod]


class _Rows:
    """The sequences as they grow. A row that has ended is carried along unchanged."""

    def __init__(self, prompts: list[list[int]], stops: frozenset[int], max_new_tokens: int) -> None:
        self.rows = [list(p) for p in prompts]
        self.lengths = [len(p) for p in prompts]
        self.stops, self.max_new_tokens = stops, max_new_tokens
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.reasons = [""] * len(prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows))

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return all(self.reasons)

    def append(self, tokens: list[int], logprobs: list[float]) -> None:
        """One more token for every row that has not ended."""
        for i, row in enumerate(self.rows):
            if self.reasons[i]:
                continue
            row.append(tokens[i])
            self.logprobs[i].append(logprobs[i])
            if tokens[i] in self.stops:
                self.reasons[i] = "stop"
            elif len(self.logprobs[i]) == self.max_new_tokens:
                self.reasons[i] = "length"

    def result(self) -> Generated:
        """The new tokens."""
        new = [row[n:] for row, n in zip(self.rows, self.lengths, strict=True)]
        return Generated(new, self.logprobs, self.reasons)


def _first_pass(rows: list[list[int]]) -> tuple[Batch, Tensor]:
    """All tokens, padded on the right with token 0, and where each row's last one is."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    positions = torch.arange(longest).expand(len(rows), -1)
    return _batch(tokens, positions), torch.tensor([len(row) - 1 for row in rows])


def _next_pass(found: _Rows) -> tuple[Batch, Tensor]:
    """Each row's last token at its own position."""
    tokens = torch.tensor([row[-1:] for row in found.rows])
    positions = torch.tensor([[len(row) - 1] for row in found.rows])
    return _batch(tokens, positions), torch.zeros(len(found.rows), dtype=torch.long)


def _batch(tokens_BS: Tensor, positions_BS: Tensor) -> Batch:
    ids = torch.arange(tokens_BS.shape[0])
    return Batch(tokens_BS, tokens_BS, torch.zeros(tokens_BS.shape), positions_BS, ids)
