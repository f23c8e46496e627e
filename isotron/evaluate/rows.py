"""What a task asks a model: rows of tokens, of which the last ones count. PURE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")
BLOCK = 2048  # rows that are asked for together


@dataclass(frozen=True)
class Row:
    """Tokens of which those from place `first` (1 or more) on count; each follows all that stand before it."""

    tokens: Sequence[int]
    first: int

    @property
    def count(self) -> int:
        """Tokens that count."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Scored:
    """Of each token that counts: its log-probability (nats), and whether it is the likeliest one."""

    logprobs: list[float]
    greedy: list[bool]

    @property
    def total(self) -> float:
        """Log-probability of all of them together."""
        return sum(self.logprobs)

    @property
    def exact(self) -> bool:
        """Whether greedy decoding would give exactly these tokens."""
        return all(self.greedy)


LogProbs: TypeAlias = Callable[[Sequence[Row]], list[Scored]]


def blocks(items: Iterable[T], size: int = BLOCK) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    block: list[T] = []
    for item in items:
        block.append(item)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def asked(logprobs: LogProbs, rows: Iterable[Row]) -> Iterator[tuple[Row, Scored]]:
    """Every row with its scores, in order; rows are made as they are needed."""
    for block in blocks(rows):
        yield from zip(block, logprobs(block), strict=True)


def windows(tokens: Sequence[int], width: int, stride: int) -> Iterator[Row]:
    """Rows in which every token but the first counts exactly once.

    A row has at most `width` inputs. Each begins `stride` tokens after the one before it, and of all but the first the
    last `stride` places count, so that every token sees at least width - stride tokens before it.
    """
    stride = min(stride, width) if stride > 0 else width
    start, done = 0, 1  # tokens before `done` have counted
    while done < len(tokens):
        row = tokens[start : start + width + 1]
        yield Row(row, done - start)
        done = start + len(row)
        start += stride


def cut(context: Sequence[int], scored: Sequence[int], width: int) -> Row:
    """A row of what counts with as much of the end of its context as fits; at least one token of either."""
    kept = max(1, width + 1 - len(scored))
    before = list(context)[-kept:]
    counted = list(scored)[: max(1, width + 1 - len(before))]
    return Row([*before, *counted], len(before))
