"""Does a model find a fact far back in its text? A needle-style check, on held-out text.

A row is text with a needle, 16 tokens of another document, somewhere in it; at its end stand the needle's first four
tokens, and the rest of it is asked for. What counts is how much likelier the rest is than behind the same row without
the needle (nats per token, 0: nothing was found), and how often the likeliest token is the right one.

    python examples/needle.py runs/long --text data/valid --lengths 512 1024 2048 4096
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from isotron.config.schema import changed, from_dict
from isotron.core.checkpoint.format import read_manifest
from isotron.core.mesh import ALONE, Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.data.indexed import IndexedDataset
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.rows import Row
from isotron.inference.generate import loaded_model
from isotron.inference.session import find_step

NEEDLE, PROMPT = 16, 4


def tokens_of(prefix: str) -> list[int]:
    """All documents of a token file, given as training is given it, one after the other."""
    data = IndexedDataset(prefix if Path(f"{prefix}.idx").is_file() else f"{prefix}_text_document")
    return [int(t) for i in range(len(data.lengths)) for t in data.get(i, 0, int(data.lengths[i]))]


def pairs(text: Sequence[int], length: int, count: int) -> list[tuple[Row, Row]]:
    """Rows of `length` tokens with a needle, and the same rows without it; depths spread evenly."""
    draw, found = random.Random(length), []
    hay = length - 2 * NEEDLE
    for i in range(count):
        at, other = draw.randrange(len(text) - hay), draw.randrange(len(text) - 2 * NEEDLE)
        needle, nothing = text[other : other + NEEDLE], text[other + NEEDLE : other + 2 * NEEDLE]
        depth = hay * i // count
        before, after = text[at : at + depth], text[at + depth : at + hay]
        rows = [Row([*before, *middle, *after, *needle], length - NEEDLE + PROMPT) for middle in (needle, nothing)]
        found.append((rows[0], rows[1]))
    return found


def needle(model: ParallelModel, text: Sequence[int], length: int, count: int) -> tuple[float, float]:
    """(nats per token that the needle is worth, share of its tokens that are the likeliest)."""
    both = pairs(text, length, count)
    scores = ModelScorer(model, 1)([row for pair in both for row in pair])
    gains = [a.total - b.total for a, b in zip(scores[::2], scores[1::2], strict=True)]
    right = sum(sum(score.greedy) for score in scores[::2])
    asked = count * (NEEDLE - PROMPT)
    return sum(gains) / asked, right / asked


def load(path: str, positions: int) -> ParallelModel:
    """The model of a checkpoint on one process, with as many positions."""
    step = find_step(path, ALONE)
    config = from_dict(read_manifest(step).meta["config"])
    config = changed(config, max_position_embeddings=max(positions, config.model.max_position_embeddings))
    return loaded_model(changed(config, **vars(Layout(dp=1))), step, Mesh(), torch.device("cpu"))


def main(words: Sequence[str] | None = None) -> None:
    """One line per length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a run or a step of one")
    parser.add_argument("--text", required=True, help="prefix of a token file that was not trained on")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args(words)
    text = tokens_of(args.text)
    model = load(args.checkpoint, max(args.lengths))
    for length in args.lengths:
        gain, right = needle(model, text, length, args.count)
        print(f"{length:6} tokens: the needle is worth {gain:+.3f} nats a token, {100 * right:.1f} % are the likeliest")


if __name__ == "__main__":
    main()
