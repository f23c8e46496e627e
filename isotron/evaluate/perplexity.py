"""Perplexity: of WikiText-103, and of any documents.

WikiText-103 is one stream of tokens read through windows. Its word-level perplexity spreads the same loss over the
words that the file had before it was turned back into plain text: exp(loss x (tokens - 1) / (words - 1)), where words
are separated by single spaces, so that the end of a line is one (Merity et al. 2016; Shoeybi et al. 2019, section 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from isotron.core.errors import refuse
from isotron.data.indexed import IndexedDataset
from isotron.evaluate.files import existing, text_of, texts
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Ratio, Result, exponential
from isotron.evaluate.rows import LogProbs, Row, asked, windows

LARGEST = 20.0  # perplexities of models that know nothing are cut here, in nats

# what the makers of WikiText wrote apart, and how plain text has it
_JOINED = (
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "), (" ; ", "; "), (" . ", ". "),
    (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
)  # fmt: skip
_ENCLOSED = (r"\(\s*([^\)]*?)\s*\)", r"\[\s*([^\]]*?)\s*\]", r"{\s*([^}]*?)\s*}", r"\"\s*([^\"]*?)\s*\"",
             r"'\s*([^']*?)\s*'")  # fmt: skip
_LAST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def plain(text: str) -> str:
    """WikiText as running text: marks stand where they stand in a book."""
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for apart, joined in _JOINED:
        text = text.replace(apart, joined)
    for pattern in _ENCLOSED:
        text = re.sub(pattern, lambda m: m[0][0] + m[1] + m[0][-1], text)
    for apart, joined in _LAST:
        text = text.replace(apart, joined)
    return text


def wikitext(how: Asked, logprobs: LogProbs) -> Result:
    """Token-level and word-level perplexity of a wiki.*.tokens file."""
    text = text_of(how.name, existing(how.name, how.path))
    words = len(text.strip().split(" "))
    tokens = how.tokenizer.encode(plain(text))
    if len(tokens) < 2 or words < 2:
        raise refuse(f"--task {how.name}={how.path}", "it has fewer than two words", "wiki.test.tokens")
    loss = Ratio()
    for row, scored in asked(logprobs, islice(windows(tokens, how.width, how.stride), how.limit or None)):
        loss.add(-scored.total, row.count)
    counted = int(loss.b)
    share = (words - 1) * counted / (len(tokens) - 1)  # all of them, unless a limit was set
    values = {
        "loss": loss.value(),
        "perplexity": exponential(loss.value(), LARGEST),
        "word_perplexity": exponential(loss.value(share), LARGEST),
    }
    facts = {"tokens": counted, "words": words, "stride": min(how.stride or how.width, how.width)}
    return Result(how.name, values, loss.n, facts)


def documents(how: Asked, logprobs: LogProbs) -> Result:
    """Perplexity of the documents of a JSON Lines file or of a .bin/.idx pair, each from its first token on."""
    per_token, per_word, per_byte = Ratio(), Ratio(), Ratio()
    for sizes, total in _totals(how, logprobs):
        per_token.add(-total, sizes[0])
        per_word.add(-total, sizes[1])
        per_byte.add(-total, sizes[2])
    if not per_token.b:
        raise refuse(f"--task {how.name}={how.path}", "it has no tokens", "a file with documents")
    loss = per_token.value()
    values = {"loss": loss, "perplexity": exponential(loss)}
    if per_word.b:
        bits = per_byte.value(per_byte.b * 0.6931471805599453)
        values |= {"word_perplexity": exponential(per_word.value()), "bits_per_byte": bits}
    return Result(how.name, values, per_token.n, {"tokens": int(per_token.b), "stride": how.stride or how.width})


def _totals(how: Asked, logprobs: LogProbs) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Per document its tokens, words and bytes, and the log-probability of all of it."""
    sizes: dict[int, tuple[int, int, int]] = {}
    totals: dict[int, float] = {}
    numbers: list[int] = []

    def rows() -> Iterator[Row]:
        for number, (tokens, words, size) in enumerate(islice(_read(how), how.limit or None)):
            if len(tokens):
                sizes[number] = (len(tokens), words, size)
                for row in windows([*how.start, *tokens], how.width, how.stride):
                    numbers.append(number)
                    yield row

    for at, (_, scored) in enumerate(asked(logprobs, rows())):
        totals[numbers[at]] = totals.get(numbers[at], 0.0) + scored.total
    yield from ((sizes[n], total) for n, total in totals.items())


def _read(how: Asked) -> Iterable[tuple[Sequence[int], int, int]]:
    """(tokens, words, bytes) of each document; a pair of token files has neither words nor bytes."""
    if existing_prefix(how.path):
        return ((tokens, 0, 0) for tokens in _indexed(how))
    path = existing(how.name, how.path)
    found = texts(how.name, path, how.key)
    return ((how.tokenizer.encode(t), len(t.split()), len(t.encode())) for t in found)


def existing_prefix(path: str) -> str:
    """The prefix of a .bin/.idx pair that `path` names: the prefix itself, one of its files, or as preprocess ends
    it; empty where there is none."""
    from isotron.data.indexed import bin_path, idx_path

    stem = re.sub(r"\.(bin|idx)$", "", path)
    for prefix in (stem, f"{stem}_text_document"):
        if bin_path(prefix).is_file() and idx_path(prefix).is_file():
            return prefix
    return ""


def _indexed(how: Asked) -> Iterator[list[int]]:
    data = IndexedDataset(existing_prefix(how.path))
    ends = data.document_indices.tolist()
    for first, last in zip(ends, ends[1:], strict=False):
        yield [int(t) for i in range(first, last) for t in data[i]]
