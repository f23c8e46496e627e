"""Generation with an encoder and a decoder: the encoder reads each prompt once, the decoder writes an answer.

Legend: B rows, E tokens of the prompts, V vocabulary. A block of the decoder remembers its own keys and values of every
token so far, and those of what the encoder gave; a token costs one pass of the decoder's stages. Every rank makes the
same calls, and the same tokens come out of every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.errors import Problem, Refused, refuse
from isotron.core.nn.cross import CrossBlock, Scored, Streams
from isotron.core.nn.encoder_decoder import EncoderDecoder
from isotron.core.parallel.model import ParallelModel
from isotron.inference.config import EngineConfig, Wish
from isotron.inference.engine import Engine, best, draws_of, refuse_errors
from isotron.inference.row import Row
from isotron.inference.scheduler import Work
from isotron.inference.text import Text
from isotron.tokenizers.base import Tokenizer


class Remembering(nn.Module):
    """The core of a decoder's self-attention while it writes: keys and values of the rows so far, and one more."""

    def __init__(self, core: Scored) -> None:
        super().__init__()
        self.core = Scored(core.dropout, biased=True)  # one query, which every key so far comes before
        self.seen: tuple[Tensor, Tensor] | None = None

    def forward(self, q_BHSN: Tensor, k_BHSN: Tensor, v_BHSN: Tensor, ctx: Streams) -> Tensor:
        """o_BHSN of one token."""
        new = k_BHSN, v_BHSN
        if self.seen is None:
            self.seen = new
        else:
            self.seen = torch.cat((self.seen[0], new[0]), 2), torch.cat((self.seen[1], new[1]), 2)
        found: Tensor = self.core(q_BHSN, *self.seen, ctx)
        return found

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        if self.seen is not None:
            self.seen = self.seen[0][rows], self.seen[1][rows]


class Looking:
    """Keys and values of what the encoder gave, formed once."""

    def __init__(self, form: Any) -> None:
        self.form = form
        self.seen: tuple[Tensor, Tensor] | None = None

    def __call__(self, ctx: Streams) -> tuple[Tensor, Tensor]:
        """k_BHEN, v_BHEN."""
        if self.seen is None:
            self.seen = self.form(ctx)
        return self.seen

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        if self.seen is not None:
            self.seen = self.seen[0][rows], self.seen[1][rows]


@contextmanager
def remembering(module: EncoderDecoder) -> Iterator[list[Remembering | Looking]]:
    """Inside, the decoder's blocks of this stage remember; afterwards they are as before."""
    blocks = [block for block in module.layers.values() if isinstance(block, CrossBlock)]
    cores, training = [block.attention.core for block in blocks], module.training
    kept: list[Remembering | Looking] = []
    try:
        module.eval()
        for block in blocks:
            own, looked = Remembering(block.attention.core), Looking(block.cross.seen)  # type: ignore[arg-type]
            block.attention.core, block.cross.seen = own, looked  # type: ignore[assignment, method-assign]
            kept += [own, looked]
        yield kept
    finally:
        module.train(training)
        for block, core in zip(blocks, cores, strict=True):
            block.attention.core = core
            block.cross.__dict__.pop("seen", None)


class Writer:
    """The rows of a batch while their answers grow. `tokens`: the last one of each row, [B, 1]."""

    def __init__(self, engine: Engine, sources: Sequence[Sequence[int]], start: int) -> None:
        self.engine, self.runner = engine, engine.runner
        self.module: EncoderDecoder = engine.runner.module
        device, longest = engine.model.device, max(map(len, sources))
        rows = torch.tensor([[*row, *[0] * (longest - len(row))] for row in sources], device=device)
        lengths = torch.tensor([len(row) for row in sources], device=device)
        first = torch.full((len(rows), 1), start, device=device)
        self.batch = self._with(first, rows, lengths)
        self.done = 0

    def _with(self, tokens_B1: Tensor, source_BE: Tensor, lengths_B: Tensor) -> Batch:
        none = torch.zeros_like(tokens_B1)
        return Batch(tokens_B1, none, none, none, none[:, 0], source=source_BE, source_lengths=lengths_B)

    def logits(self) -> Tensor | None:
        """[B, V] on the ranks of the last stage: of what comes behind the rows so far."""
        found = self._further() if self.done else self.module.carried(self.batch, self.runner.receive(self.batch))
        self.done += 1
        if not self.module.is_last:
            self._send(found)
            return None
        return self.runner.whole_vocabulary(self.module.logits_of(found["hidden"])[:, 0])

    def _further(self) -> dict[str, Tensor]:
        """One more token; stages of the encoder alone have nothing to do."""
        begins, decodes = "decoder_dropout" in self.module.ends, "decoder_bias" in self.module.ends
        if not decodes:
            return {}
        hidden = None if begins else self._hidden()
        return {"hidden": self.module.further(self.batch, self.done, hidden)}

    def _hidden(self) -> Tensor:
        group, model = self.runner.mesh.group("pp"), self.engine.model
        space = torch.empty(len(self.batch.tokens), 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
        (pending,) = comm.exchange([], [(space, group.ranks[group.index - 1])], group)
        return pending.wait()

    def _send(self, found: dict[str, Tensor]) -> None:
        """To the next stage, by name; it receives in the same order."""
        group = self.runner.mesh.group("pp")
        for _, x in sorted(found.items()):
            (pending,) = comm.exchange([(x.contiguous(), group.ranks[group.index + 1])], [], group)
            pending.wait()

    def go_on(self, rows: list[int], tokens: list[int], kept: Sequence[Remembering | Looking]) -> None:
        """With these rows of the batch, and their next tokens."""
        source, lengths = self.batch.source, self.batch.source_lengths
        if source is None or lengths is None:
            raise ValueError("a writer without sources")
        device = self.engine.model.device
        chosen = torch.tensor(rows, device=device)
        if len(rows) < len(source):
            for part in kept:
                part.keep(chosen)
            source, lengths = source[chosen], lengths[chosen]
        self.batch = self._with(torch.tensor(tokens, device=device)[:, None], source, lengths)


class PairEngine(Engine):
    """An `Engine` of an encoder and a decoder: prompts are what the encoder reads, to their end of sequence; answers
    begin behind the token that the decoder starts with.
    """

    def __init__(
        self, model: ParallelModel, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None
    ) -> None:
        super().__init__(model, tokenizer, config)
        if self.config.speculate not in ("auto", "none"):
            case = f"family {model.config.family} writes one token at a time"
            raise refuse(f"--speculate {self.config.speculate}", case, "--speculate none")

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], wish: Wish, first_request: int = 0) -> list[list[Row]]:
        """Per prompt its `wish.n` best answers; `config.rows` of them are at work at once."""
        self._check(prompts, wish)
        answers = [self._rows(wish, first_request + i) for i in range(len(prompts))]
        work = [(row, prompts[i]) for i, rows in enumerate(answers) for row in rows]
        self.model.wait_weights()
        for at in range(0, len(work), self.config.rows):
            self._write(work[at : at + self.config.rows])
        refuse_errors(answers)
        return [best(rows, wish.n) for rows in answers]

    def _check(self, prompts: Sequence[Sequence[int]], wish: Wish) -> None:
        problems, vocab = wish.problems(), self.model.config.vocab_size
        for i, row in enumerate(prompts):
            outside = [token for token in row if not 0 <= token < vocab]
            if outside or not row:
                case = (
                    f"it has the token {outside[0]}, the model's are 0..{vocab - 1}" if outside else "it has no token"
                )
                problems.append(Problem(f"prompt {i}", case, "the tokenizer that the model was trained with"))
        if problems:
            raise Refused(problems)

    def _rows(self, wish: Wish, request: int) -> list[Row]:
        start, rows = self.model.config.decoder_start_token_id, []
        for sample in range(wish.samples):
            row = Row([start], 1, wish, request, sample)
            if wish.ending.stop:
                row.text = Text(self._need_tokenizer("stop texts"), [], wish.ending.stop)
            if wish.grammar is not None:
                row.grammar = self.grammar(*wish.grammar)
            rows.append(row)
        return rows

    def _write(self, work: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """All answers of one batch, to their ends."""
        rows = [row for row, _ in work]
        with remembering(self.runner.module) as kept:
            writer = Writer(self, [source for _, source in work], self.model.config.decoder_start_token_id)
            while rows:
                draws = [draw for row in rows for draw in draws_of(Work(row, 1, 1), self.runner.decides)]
                told = self._told(writer.logits(), draws, [row.wish for row in rows])
                for row, one in zip(rows, told, strict=True):
                    row.emit(one.token, one.logprob, one.tops)
                left = [i for i, row in enumerate(rows) if not row.reason]
                rows = [rows[i] for i in left]
                if rows:
                    writer.go_on(left, [row.tokens[-1] for row in rows], kept)
