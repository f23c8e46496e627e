"""One pass through a model in a layout: spans of sequences in, logits out.

Legend: T tokens of the pass (rows of one token), D hidden, V vocabulary, O tokens whose logits are asked for.

Pipeline stages run in turn; every rank is given the same spans. Angles of rotary positions come from a table, made by
the model's own function, so that a token is turned by its own sequence's frequencies whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.mesh import AXES, rank_of
from isotron.core.nn.context import Context
from isotron.core.parallel.model import ParallelModel
from isotron.inference.cache import Cache, cached
from isotron.inference.lean import lean
from isotron.inference.plan import SHORT, Pass, Span


class Runner:
    """Passes of one model. Every rank makes the same calls."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.mesh = model, model.mesh
        (self.stage,) = model.stages.values()
        self.module: Any = self.stage.module
        self.world = self.mesh.group(*AXES)
        last = {"tp": 0, "cp": 0, "dp": 0, "pp": self.mesh.sizes["pp"] - 1}
        self.decider = self.world.ranks.index(rank_of(last, self.mesh.sizes))
        self.decides = self.world.index == self.decider
        self.cache: Cache | None = None
        self.passes = 0
        self.keeps_outputs = False
        self.outputs: tuple[list[Span], list[Tensor]] | None = None  # of the last pass: normed, [T, D] for each span

    @property
    def stretch_begins(self) -> int:
        """Sequences longer than this are rotated by other frequencies; 0: none is."""
        cfg = self.model.config
        if getattr(cfg, "rope_scaling", "none") != "longrope":
            return 0
        return int(cfg.rope_original_positions or cfg.max_position_embeddings)

    @contextmanager
    def opened(self, pages: int, page: int) -> Iterator[None]:
        """Inside, passes can be run, on a new and empty cache of `pages` x `page` tokens."""
        self.model.wait_weights()
        self.cache = Cache(pages, page)
        context, turns = self.module._context, _Turns(self)
        self.module._context = turns
        try:
            with cached(self.module, self.cache), lean(self.module, stays=self.module.around is None):
                self.turns = turns
                yield
        finally:
            self.module._context = context
            self.cache = None

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], wanted: Sequence[int]) -> Tensor | None:
        """Logits [O, V] on the ranks of the last stage: of the last `wanted[i]` tokens of span i (0: of none)."""
        if self.cache is None:
            raise RuntimeError("passes are run inside Runner.opened")
        shared = [self._spread(s) if self.mesh.sizes["cp"] > 1 else (s, None) for s in spans]
        given, spans = spans, [rest for rest, _ in shared]
        now = Pass(list(spans), self.cache.page, self.model.device, self.model.dtype)
        x_T1D = self._through(now, self.cache)
        if x_T1D is None:
            return None
        if self.keeps_outputs:
            parts = self.module.norm(x_T1D)[:, 0].split([s.count for s in now.spans])
            of = dict(zip(map(id, now.spans), parts, strict=True))
            whole = (of[id(s)] if early is None else torch.cat((early, of[id(s)])) for s, early in shared)
            self.outputs = list(given), list(whole)
        asked = {id(s): n for s, n in zip(spans, wanted, strict=True)}
        x_O1D = x_T1D[_asked_tokens(now, asked)]
        logits = self.module.logits_of(x_O1D)[:, 0]
        return _in_given_order(self.whole_vocabulary(logits), spans, now, asked)

    def _through(self, now: Pass, cache: Cache) -> Tensor | None:
        """x_T1D of the last stage's blocks; the other stages send theirs on."""
        self.passes += 1
        batch = _batch(now)
        cache.now = now
        self.turns.take(now, batch)
        x_T1D: Tensor = self.module.hidden(batch, self.receive(batch))
        cache.now = None
        if self.module.is_last:
            return x_T1D
        self._send(x_T1D)
        return None

    def _spread(self, span: Span) -> tuple[Span, Tensor | None]:
        """Run a long span in equal parts on the context-parallel ranks, but for its last tokens, which are left; with
        the outputs of all parts, where these are kept.

        Keys and values of all parts come to every rank's cache, so that all of them can go on with any sequence.
        """
        group = self.mesh.group("cp")
        each = (span.count - 1) // group.size
        if each <= SHORT or self.cache is None:
            return span, None
        part = replace(span, start=span.start + group.index * each, count=each)
        x_T1D = self._through(Pass([part], self.cache.page, self.model.device, self.model.dtype, group), self.cache)
        done = each * group.size
        early = None
        if self.keeps_outputs and x_T1D is not None:
            early = comm.all_gather(self.module.norm(x_T1D)[:, 0].contiguous(), group, 0)
        return replace(span, start=span.start + done, count=span.count - done), early

    @torch.inference_mode()
    def predict(
        self, spans: Sequence[Span], given: Sequence[Tensor | None], depth: int = 0
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """What module `depth` for tokens further ahead gives: logits [O, V] at the last place of each span, and outputs
        [T, D] at all of them; on the ranks of the last stage, elsewhere nothing.

        `given`: outputs [T, D] of the model, or of a module, at the places of each span.
        """
        if self.cache is None:
            raise RuntimeError("passes are run inside Runner.opened")
        if not self.module.is_last:
            return None, [None] * len(spans)
        now = Pass(list(spans), self.cache.page, self.model.device, self.model.dtype)
        batch = _batch(now)
        self.cache.now = now
        self.turns.take(now, batch)
        x_of = {id(s): x for s, x in zip(spans, given, strict=True)}
        x_T1D = torch.cat([x for s in now.spans for x in [x_of[id(s)]] if x is not None])[:, None]
        context = self.turns(batch, x_T1D.dtype)
        x_T1D = self.module.mtp[depth](self.module.mtp_embed(batch.tokens), x_T1D, context)
        self.cache.now = None
        asked = {id(s): 1 for s in spans}
        x_O1D = x_T1D[_asked_tokens(now, asked)]
        logits = self.whole_vocabulary(self.module.head.logits(x_O1D)[:, 0])
        outputs = dict(zip(map(id, now.spans), x_T1D[:, 0].split([s.count for s in now.spans]), strict=True))
        return _in_given_order(logits, spans, now, asked), [outputs[id(s)] for s in spans]

    def tell(self, values: Tensor) -> Tensor:
        """The decider's tensor on every rank, in place."""
        return comm.broadcast(values, self.world, self.decider)

    def receive(self, batch: Batch) -> dict[str, Tensor]:
        """What the stage before sends; nothing on the first stage."""
        group = self.mesh.group("pp")
        if group.index == 0:
            return {}
        boundary = {}
        for name, (shape, dtype) in sorted(self.stage.boundary_shapes(batch, self.stage.number - 1).items()):
            space = torch.empty(shape, dtype=dtype, device=self.model.device)
            (pending,) = comm.exchange([], [(space, group.ranks[group.index - 1])], group)
            boundary[name] = pending.wait()
        return boundary

    def _send(self, x_T1D: Tensor) -> None:
        group = self.mesh.group("pp")
        (pending,) = comm.exchange([(x_T1D.contiguous(), group.ranks[group.index + 1])], [], group)
        pending.wait()

    def whole_vocabulary(self, local: Tensor) -> Tensor:
        """[O, V]: every rank's columns, without the padding; every rank holds equally many, real or padding."""
        held = self.module.head.weight.shape[0]
        if self.mesh.sizes["tp"] > 1 and local.shape[-1] < held:
            local = torch.nn.functional.pad(local, (0, held - local.shape[-1]))
        full = comm.all_gather(local, self.mesh.group("tp"), 1)
        return full[:, : self.model.config.vocab_size]


def _batch(now: Pass) -> Batch:
    tokens_T1 = now.tokens_T[:, None]
    return Batch(tokens_T1, tokens_T1, tokens_T1, now.positions_T[:, None], now.tokens_T)


def _asked_tokens(now: Pass, asked: dict[int, int]) -> Tensor:
    index: list[int] = []
    first = 0
    for s in now.spans:
        index += range(first + s.count - asked[id(s)], first + s.count)
        first += s.count
    return torch.tensor(index, dtype=torch.long, device=now.device)


def _in_given_order(logits_OV: Tensor, spans: Sequence[Span], now: Pass, asked: dict[int, int]) -> Tensor:
    """Rows in the order of the caller's spans; a pass has its short ones first."""
    if all(a is b for a, b in zip(spans, now.spans, strict=True)):
        return logits_OV
    where, first = {}, 0
    for s in now.spans:
        where[id(s)] = range(first, first + asked[id(s)])
        first += asked[id(s)]
    return logits_OV[[i for s in spans for i in where[id(s)]]]


class _Turns:
    """Stands for the decoder's own context: the same, with angles from a table."""

    def __init__(self, runner: Runner) -> None:
        self.make = runner.module._context
        self.model, self.begins = runner.model, runner.stretch_begins
        self.length = 0
        self.tables: list[Tensor] = []  # cos and sin, and those of blocks with a window where they differ
        self.now: Context | None = None

    def take(self, now: Pass, batch: Batch) -> None:
        """The context of the pass to come."""
        longest = max(s.end for s in now.spans)
        if longest > self.length:
            self._grow(longest)
        if not self.tables:
            self.now = replace(self.make(batch, self.model.dtype), batch=batch)
            return
        at_T = now.positions_T
        if self.begins and any(s.long for s in now.spans):
            late = [s.long for s in now.spans for _ in range(s.count)]
            at_T = at_T + torch.tensor(late, device=at_T.device) * self.length
        cos, sin, *local = (table.index_select(0, at_T) for table in self.tables)
        self.now = Context(batch, (cos, sin), local_rope=(local[0], local[1]) if local else None)

    def _grow(self, longest: int) -> None:
        limit = self.model.config.max_position_embeddings or longest
        self.length = max(longest, min(limit, max(512, 2 * self.length)))
        ends = [self.length]
        if self.begins:  # the model's function takes the long frequencies as soon as one position is beyond the first
            ends = [min(self.begins, self.length), max(self.begins + 1, self.length)]
        parts = [[_fitted(t, self.length) for t in self._angles(end)] for end in ends]
        self.tables = [torch.cat(tables) for tables in zip(*parts, strict=True)]

    def _angles(self, end: int) -> list[Tensor]:
        """(cos, sin) of positions 0 .. end - 1, each [end, 1, 1, N/2], of a sequence of that length; none without."""
        positions = torch.arange(end, device=self.model.device)[None]
        context = self.make(Batch(positions, positions, positions, positions, positions[0, :1]), self.model.dtype)
        return [t[0][:, None] for rope in (context.rope, context.local_rope) if rope is not None for t in rope]

    def __call__(self, batch: Batch, dtype: torch.dtype) -> Context:
        if self.now is None:
            raise RuntimeError("no pass has begun")
        return self.now


def _fitted(table: Tensor, length: int) -> Tensor:
    """Exactly `length` rows; rows beyond what the short frequencies serve are never looked at."""
    if len(table) >= length:
        return table[:length]
    return torch.cat((table, table.new_zeros(length - len(table), *table.shape[1:])))
