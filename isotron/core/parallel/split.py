"""How blocks are dealt to pipeline stages: by number, by cost, or as a layout string says. PURE.

A split is the range of blocks of every stage. A block that two stages have is cut between them: the first has its
attention, the second its MLP, each with the norm and the residual of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from math import inf, prod
from typing import Any

from isotron.core.errors import Refused, refuse

ATTENTION, MLP = "attention", "mlp"  # halves of a block, by the beginning of the names of their modules
WORTH = 0.02  # by how much faster the slowest stage must become for blocks to be cut
EXAMPLE = '--pipeline-layout "Et*3|(tt|)*2,L"'
_UNIT = re.compile(r"\((?P<group>[^()]*)\)|(?P<one>[A-Za-z|])")
_TIMES = re.compile(r"\*(\d+)")


@dataclass(frozen=True)
class StageParts:
    """What one stage of a layout string holds: `E` embedding, `t` blocks, `m` multi-token prediction, `L` loss."""

    embedding: int
    blocks: int
    prediction: int
    loss: int


def expand(text: str) -> str:
    """The letters and bars of a layout string, repetitions written out: `(t|)*2,L` is `t|t|L`."""
    rest, out = text.replace(",", "").replace(" ", ""), []
    while rest:
        unit = _UNIT.match(rest)
        if not unit:
            case = f"{rest[:12]!r} is neither E, t, m, L, a bar, nor one of them or a group in brackets times a number"
            raise refuse(f"--pipeline-layout {text}", case, EXAMPLE)
        rest = rest[unit.end() :]
        times = _TIMES.match(rest)
        if times:
            rest = rest[times.end() :]
        found = unit["one"] if unit["group"] is None else expand(unit["group"]) if unit["group"] else ""
        out.append(found * (int(times[1]) if times else 1))
    return "".join(out)


@lru_cache(maxsize=64)
def parse_layout(text: str) -> tuple[StageParts, ...]:
    """The stages of a layout string, in model order; refuses letters it does not know and ends in the wrong place."""
    stages = expand(text).split("|")
    unknown = sorted({letter for stage in stages for letter in stage} - set("EtmL"))
    whole = "".join(stages)
    if unknown:
        raise refuse(f"--pipeline-layout {text}", f"{', '.join(unknown)} is not one of E, t, m, L", EXAMPLE)
    if whole.count("E") != 1 or not stages[0].startswith("E") or whole.count("L") != 1 or not stages[-1].endswith("L"):
        case = "it begins with the one E (embedding) and ends with the one L (output layer and loss)"
        raise refuse(f"--pipeline-layout {text}", case, EXAMPLE)
    return tuple(StageParts(*(stage.count(letter) for letter in "EtmL")) for stage in stages)


def stage_count(text: str) -> int:
    """Stages of a layout string; 0 when it cannot be read (which a rule reports)."""
    try:
        return len(parse_layout(text))
    except Refused:
        return 0


def layout_counts(text: str) -> list[int]:
    """Blocks of each stage; refuses what no model family here has."""
    stages = parse_layout(text)
    if any(stage.prediction for stage in stages):
        case = "no model family here predicts several tokens, so there is nothing for m to stand for"
        raise refuse(f"--pipeline-layout {text}", case, "--pipeline-layout " + text.replace("m", ""))
    return [stage.blocks for stage in stages]


@dataclass(frozen=True)
class LayerCosts:
    """Relative cost of every block, and of what the first and the last stage have besides.

    `scores`: what of each block has no weights; empty where nothing is. `head`: what of `last` is the output layer.
    `attention`: the attention half of each block, scores included; empty where blocks cannot be cut.
    """

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0
    scores: tuple[float, ...] = ()
    head: float = 0.0
    attention: tuple[float, ...] = ()

    def of(self, block: int, half: str) -> float:
        """A block, or a half of it."""
        if not half:
            return self.blocks[block]
        first = self.attention[block]
        return first if half == ATTENTION else self.blocks[block] - first

    def in_time(self, cut: bool) -> list[float]:
        """Blocks as they take time, or their halves one after the other: a multiplication of scores takes about twice
        as long as one of a matrix product.
        """
        scores = self.scores or (0.0,) * len(self.blocks)
        if not cut:
            return [block + more for block, more in zip(self.blocks, scores, strict=True)]
        each = zip(self.blocks, self.attention, scores, strict=True)
        return [x for block, first, more in each for x in (first + more, block - first)]


def model_costs(config: Any) -> LayerCosts:
    """Multiply-adds per token from the layout table of a model: matrices, attention scores, the output layer.

    Blocks may differ (rules for single layer numbers count for those); of experts a token meets those that it visits;
    looking up an embedding costs nothing. What stands before the output layer, and modules that predict further tokens,
    are on the last stage. Of an encoder and a decoder each block counts for the tokens of its own rows, so these are
    multiply-adds of a pair.
    """
    if hasattr(config, "multiplications"):
        pairs, output = config.multiplications(max(config.max_position_embeddings, 1))
        return LayerCosts(tuple(m + s for m, s in pairs), 0.0, output, tuple(s for _, s in pairs), output)
    visited: Callable[[str], float] = getattr(config, "visited", lambda pattern: 1.0)
    rules = [rule for rule in config.layout(max(config.vocab_size, 1)).rules if len(rule.shape) >= 2]
    seen = 1 if getattr(config, "causal", True) else 2  # of a row, in halves
    attention = float(seen * config.num_attention_heads * config.head_size * max(config.max_position_embeddings, 0))

    def products(begins: str) -> float:
        own = (r for r in rules if fnmatchcase(begins, ".".join(r.pattern.split(".")[: begins.count(".") + 1])))
        return float(sum(prod(r.shape) * visited(r.pattern) for r in own))

    blocks = tuple(attention + products(f"layers.{i}") for i in range(config.num_layers))
    beside = getattr(config, "parallel_residual", False)  # both halves read the same: there is no place for a cut
    first = () if beside else tuple(attention + products(f"layers.{i}.attention") for i in range(config.num_layers))
    depths = getattr(config, "mtp_num_layers", 0)
    head = float(sum(prod(r.shape) for r in rules if r.pattern.startswith("head.")))
    head = (head or products("embed")) * (1 + depths)  # a tied output layer has no entry of its own
    ahead = sum(attention + products(f"mtp.{k}") for k in range(depths))
    behind = products("transform") + ahead
    return LayerCosts(blocks, 0.0, head + behind, (attention,) * len(blocks), head, first)


@lru_cache(maxsize=64)
def balanced_counts(costs: LayerCosts, stages: int) -> tuple[float, ...]:
    """Blocks of each stage such that the slowest stage is as fast as can be, and the rest as even as can be.

    No stage is left without a block as long as there are enough. Blocks are cut where that makes the slowest stage
    faster by `WORTH`.
    """
    ends = costs.first, costs.last
    slowest, counts = _fewest(costs.in_time(cut=False), ends, stages, inf)
    if not costs.attention:
        return counts
    faster, halves = _fewest(costs.in_time(cut=True), ends, stages, slowest * (1 - WORTH))
    return tuple(tidy(n / 2) for n in halves) if faster < inf else counts


def _fewest(
    each: Sequence[float], ends: tuple[float, float], stages: int, most: float
) -> tuple[float, tuple[int, ...]]:
    """(the slowest stage, units of every stage) of the best split whose stages take at most `most`; inf where none."""
    n, least = len(each), int(len(each) >= stages)
    total = [0.0, *accumulate(each)]
    # best[k]: (slowest stage, sum of squares, counts) of the first stages holding k units
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ()), *((inf, inf, ()) for _ in range(n))]
    for stage in range(stages):
        extra = (ends[0] if stage == 0 else 0) + (ends[1] if stage == stages - 1 else 0)
        best = [
            min(
                (
                    (max(best[a][0], cost), best[a][1] + cost * cost, (*best[a][2], k - a))
                    for a in range(max(0, bisect_left(total, total[k] + extra - most)), k + 1 - least)
                    for cost in (total[k] - total[a] + extra,)
                ),
                default=(inf, inf, ()),
            )
            for k in range(n + 1)
        ]
    return best[n][0], best[n][2]


def check_counts(counts: Sequence[float], num_layers: int, stages: int) -> None:
    """Refuses counts that do not deal every block to exactly the stages there are."""
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 0 or any(2 * n % 1 for n in counts):
        raise refuse(
            f"num_layers {num_layers} over {stages} pipeline stages as {list(counts)}",
            f"the stages must be {stages} counts >= 0, of blocks or halves of blocks, that sum to {num_layers}, these "
            f"sum to {tidy(sum(counts))}",
            "--layers-per-stage with counts that sum to num_layers, or leave it out for an even split",
        )


def check_cuts(counts: Sequence[float], cut: bool) -> None:
    """Refuses halves of blocks that cannot be cut."""
    if not cut and any(n % 1 for n in counts):
        raise refuse(
            f"--layers-per-stage {','.join(map(str, counts))}",
            "blocks of this model are not cut: their MLP reads what their attention reads, or a second stream",
            "--layers-per-stage with whole numbers, or leave it out for an even split",
        )


def ranges_of(counts: Sequence[float]) -> list[range]:
    """The split in which the stages have so many blocks."""
    stops = [round(2 * stop) for stop in accumulate(counts)]
    starts = [0, *stops[:-1]]
    return [range(a // 2, (b + (a < b)) // 2) for a, b in zip(starts, stops, strict=True)]


def half_of(split: Sequence[range], stage: int, block: int) -> str:
    """What a stage has of a block: "" for all of it, or the half that is named as its modules are."""
    holders = [s for s, blocks in enumerate(split) if block in blocks]
    return "" if len(holders) == 1 else ATTENTION if stage == holders[0] else MLP


def halves_of(split: Sequence[range], stage: int) -> tuple[str, ...]:
    """The same of every block of a stage."""
    return tuple(half_of(split, stage, block) for block in split[stage])


def counts_of(split: Sequence[range]) -> list[float]:
    """Blocks of every stage."""
    return [tidy(sum(0.5 if half else 1.0 for half in halves_of(split, s))) for s in range(len(split))]


def tidy(count: float) -> float:
    """A whole number as one."""
    return int(count) if count == int(count) else count


def even_counts(num_layers: int, stages: int, first: int = 0, last: int = 0) -> list[int]:
    """As even as can be, with the blocks of the first and last stage given where they are not 0."""
    fixed = {i: n for i, n in {0: first, stages - 1: last}.items() if n}
    free = [i for i in range(stages) if i not in fixed]
    each, extra = divmod(num_layers - sum(fixed.values()), len(free)) if free else (0, 0)
    counts = [fixed.get(i, 0) for i in range(stages)]
    # one more block to the stages in the middle: the first holds the embedding, the last the head
    middle = sorted(free, key=lambda i: (abs(2 * i - (stages - 1)), i))
    for place, i in enumerate(middle):
        counts[i] = each + (place < extra)
    return counts
