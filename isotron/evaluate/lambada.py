"""LAMBADA: the last word of a passage, right when every token of it is the likeliest (Paperno et al. 2016).

Standard: the last token of the passage is asked for. Strict: the whole last word, written after a space, with the
tokens of the passage before it as context.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from isotron.core.errors import refuse
from isotron.evaluate.files import existing, texts
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Ratio, Result, exponential, mean
from isotron.evaluate.rows import LogProbs, Row, asked, cut


def lambada(how: Asked, logprobs: LogProbs) -> Result:
    """Accuracy on, and perplexity of, the last word (strict) or the last token of a JSON Lines file."""
    right: list[float] = []
    loss = Ratio()
    for _, scored in asked(logprobs, islice(_rows(how), how.limit or None)):
        right.append(float(scored.exact))
        loss.add(-scored.total, 1)
    if not right:
        raise refuse(f"--task {how.name}={how.path}", "it has no passage", "lambada_test.jsonl")
    values = {"accuracy": mean(right), "perplexity": exponential(loss.value())}
    return Result(how.name, values, len(right), {"strict": how.strict})


def _rows(how: Asked) -> Iterator[Row]:
    path = existing(how.name, how.path)
    for text in texts(how.name, path, how.key):
        if len(text.split()) < 2:
            raise refuse(
                f"--task {how.name}={how.path}", f"a passage has fewer than two words: {text!r}", "the test set"
            )
        before, last = _parts(how, text)
        yield cut(how.context(before), last, how.width)


def _parts(how: Asked, text: str) -> tuple[list[int], list[int]]:
    if not how.strict:
        tokens = how.tokenizer.encode(text)
        return tokens[:-1], tokens[-1:]
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    return how.tokenizer.encode(before), how.tokenizer.encode(f" {word}")
