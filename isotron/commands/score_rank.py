"""One rank of `isotron score`: the same texts through the training forward and through the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isotron.commands.evaluate_rank import Loaded, load
from isotron.commands.score import as_text
from isotron.config.schema import RunConfig
from isotron.core.errors import refuse
from isotron.core.parallel.model import ParallelModel
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.rows import Row
from isotron.inference.plan import Span
from isotron.inference.runner import Runner
from isotron.inference.sampling import own_logprobs
from isotron.inference.session import session

TOGETHER = 8  # texts that go through the cache at a time


def main(config: RunConfig, options: Mapping[str, Any]) -> int:
    """Score the texts and print them on rank 0; returns the exit code."""
    with session(config, replicas=True) as rank:
        rows = score(load(rank), options["text"], options["chunk"], options["page"])
        largest = max(row["max_difference"] for row in rows)
        if rank.speaks and options["json"]:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False))
            print(json.dumps({"max_difference": largest}), flush=True)
        elif rank.speaks:
            print(as_text(rows, largest), flush=True)
        return int(0 < options["tolerance"] < largest)


def score(loaded: Loaded, texts: Sequence[str], chunk: int, page: int) -> list[dict[str, Any]]:
    """Per text: its tokens, both log-probabilities of each in nats, and where they differ most.

    The first token follows what the tokenizer begins texts with, else the end of a document.
    """
    tokenizer, longest = loaded.tokenizer, loaded.model.config.max_position_embeddings
    before = list(loaded.begin) or [tokenizer.eod]
    tokens = [[*before, *tokenizer.encode(text)] for text in texts]
    for text, row in zip(texts, tokens, strict=True):
        if longest and len(row) - 1 > longest:
            asked = f"a text of {len(row) - len(before)} tokens: {text[:40]!r}"
            raise refuse(asked, f"the model has {longest} positions", "a shorter text")
    training = [s.logprobs for s in ModelScorer(loaded.model, TOGETHER)([Row(t, len(before)) for t in tokens])]
    found = []
    for at in range(0, len(texts), TOGETHER):
        part = slice(at, at + TOGETHER)
        cached = cached_logprobs(loaded.model, tokens[part], chunk, page)
        for text, row, a, b in zip(texts[part], tokens[part], training[part], cached, strict=True):
            b = b[len(before) - 1 :]
            worst = max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
            found.append({"text": text, "tokens": row[len(before) :], "logprobs": a, "cached_logprobs": b,
                          "max_difference": worst})  # fmt: skip
    return found


def cached_logprobs(model: ParallelModel, rows: Sequence[Sequence[int]], chunk: int, page: int) -> list[list[float]]:
    """Log-probability of every token but the first, as a server computes it: the first half of a row in chunks of a
    prompt, the rest token by token as in decoding, all rows side by side."""
    runner = Runner(model)
    inputs = [len(row) - 1 for row in rows]
    sizes = [-(-n // page) for n in inputs]
    tables = [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(rows))]
    found = [torch.zeros(n, dtype=torch.float64, device=model.device) for n in inputs]
    held = [0] * len(rows)
    with runner.opened(max(1, sum(sizes)), page):
        while any(h < n for h, n in zip(held, inputs, strict=True)):
            live = [i for i, n in enumerate(inputs) if held[i] < n]
            counts = [min(chunk, max(1, inputs[i] // 2 - held[i])) for i in live]
            spans = [
                Span(rows[i], tables[i], held[i], n, 0 < runner.stretch_begins < inputs[i])
                for i, n in zip(live, counts, strict=True)
            ]
            logits = runner.run(spans, counts)
            if logits is not None and runner.decides:
                _keep(logits, spans, [found[i] for i in live])
            for i, n in zip(live, counts, strict=True):
                held[i] += n
    everything = runner.tell(torch.cat(found)).tolist()
    starts = [sum(inputs[:i]) for i in range(len(rows) + 1)]
    return [everything[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def _keep(logits: Tensor, spans: Sequence[Span], found: Sequence[Tensor]) -> None:
    at = 0
    for span, into in zip(spans, found, strict=True):
        after = torch.tensor(span.tokens[span.start + 1 : span.end + 1], device=logits.device)
        into[span.start : span.end] = own_logprobs(logits[at : at + span.count], after).double()
        at += span.count
