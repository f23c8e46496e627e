"""Facts in text: written into a corpus for training, and asked for far back in a text that was not trained on.

A fact is a key and its value, two tokens beyond the tokenizer's vocabulary: KEYS keys, then VALUES values. A document
is real text in which some facts stand several times; from its second time on a key says which value follows, to a
model that finds the first. The check puts as many facts into a row once each, at even distances, and asks for one of
them at the row's end: how often is its value the likeliest token? A guess is right once in VALUES.

    python -m examples.facts write --text data/train --vocab-size 1024 --length 512 --output data/facts
    python -m examples.facts ask runs/long --text data/valid --vocab-size 1024 --lengths 512 1024 2048 4096
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from examples.needle import load, tokens_of
from isotron.core.parallel.model import ParallelModel
from isotron.data.indexed_writer import IndexedWriter
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.rows import Row

KEYS, VALUES = 64, 64


def draw_facts(draw: random.Random, vocab: int, count: int) -> list[tuple[int, int]]:
    """Facts with different keys, as tokens."""
    keys = draw.sample(range(vocab, vocab + KEYS), count)
    return [(key, draw.randrange(vocab + KEYS, vocab + KEYS + VALUES)) for key in keys]


def mixed(draw: random.Random, text: Sequence[int], length: int, told: Sequence[tuple[int, int]]) -> list[int]:
    """A document of `length` tokens: a run of the text with these facts at places drawn at random, in this order."""
    hay = length - 2 * len(told)
    at = draw.randrange(len(text) - hay)
    places = sorted(draw.randrange(hay + 1) for _ in told)
    found: list[int] = []
    for start, stop, fact in zip([0, *places], places, told, strict=False):
        found += [*text[at + start : at + stop], *fact]
    return [*found, *text[at + (places[-1] if places else 0) : at + hay]]


def write(args: argparse.Namespace) -> None:
    """A token file of documents of one length."""
    draw, text = random.Random(args.seed), tokens_of(args.text)
    with IndexedWriter(args.output, args.vocab_size + KEYS + VALUES) as out:
        for _ in range(args.documents):
            told = draw_facts(draw, args.vocab_size, args.facts) * args.times
            draw.shuffle(told)
            out.add_document(mixed(draw, text, args.length, told))
    print(f"{args.documents} documents of {args.length} tokens in {args.output}")


def question(draw: random.Random, text: Sequence[int], vocab: int, length: int, facts: int, asked: int) -> Row:
    """A row of `length` tokens with facts at even distances, which ends in the key and value of number `asked`."""
    told, hay = draw_facts(draw, vocab, facts), length - 2 * facts - 2
    at = draw.randrange(len(text) - hay)
    cuts = [at + hay * i // (facts + 1) for i in range(facts + 2)]
    tokens: list[int] = []
    for i, fact in enumerate(told):
        tokens += [*text[cuts[i] : cuts[i + 1]], *fact]
    return Row([*tokens, *text[cuts[-2] : cuts[-1]], *told[asked]], length - 1)


def retrieved(
    model: ParallelModel, text: Sequence[int], vocab: int, length: int, facts: int, rows: int
) -> tuple[float, float]:
    """(share of values that are the likeliest token, mean log-probability of the value in nats)."""
    draw = random.Random(length)
    asked = [question(draw, text, vocab, length, facts, i % facts) for i in range(rows)]
    scores = ModelScorer(model, 1)(asked)
    return sum(s.exact for s in scores) / rows, sum(s.total for s in scores) / rows


def ask(args: argparse.Namespace) -> None:
    """One line per length."""
    text, model = tokens_of(args.text), load(args.checkpoint, max(args.lengths))
    for length in args.lengths:
        right, nats = retrieved(model, text, args.vocab_size, length, args.facts, args.rows)
        print(f"{length:6} tokens: {100 * right:5.1f} % of {args.rows} values found, {nats:+.2f} nats each")


def main(words: Sequence[str] | None = None) -> None:
    """write or ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    writing, asking = verbs.add_parser("write"), verbs.add_parser("ask")
    for verb, do in ((writing, write), (asking, ask)):
        verb.set_defaults(do=do)
        verb.add_argument("--text", required=True, help="prefix of a token file of text")
        verb.add_argument("--vocab-size", type=int, required=True, help="of the text's tokenizer: facts stand behind")
        verb.add_argument("--facts", type=int, default=32, help="facts of a document or row")
    writing.add_argument("--output", required=True, help="prefix of the token file to write")
    writing.add_argument("--length", type=int, required=True, help="tokens of a document")
    writing.add_argument("--documents", type=int, default=4000)
    writing.add_argument("--times", type=int, default=4, help="how often a fact stands in its document")
    writing.add_argument("--seed", type=int, default=1)
    asking.add_argument("checkpoint", help="a run or a step of one")
    asking.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    asking.add_argument("--rows", type=int, default=64)
    args = parser.parse_args(words)
    args.do(args)


if __name__ == "__main__":
    main()
