"""How blocks are dealt to pipeline stages: by number, by cost, or as a layout string says. PURE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import inf, prod
from typing import Any

from isotron.core.errors import Refused, refuse

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
    """

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0
    scores: tuple[float, ...] = ()
    head: float = 0.0


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
    depths = getattr(config, "mtp_num_layers", 0)
    head = float(sum(prod(r.shape) for r in rules if r.pattern.startswith("head.")))
    head = (head or products("embed")) * (1 + depths)  # a tied output layer has no entry of its own
    ahead = sum(attention + products(f"mtp.{k}") for k in range(depths))
    behind = products("transform") + ahead
    return LayerCosts(blocks, 0.0, head + behind, (attention,) * len(blocks), head)


def balanced_counts(costs: LayerCosts, stages: int) -> list[int]:
    """Blocks of each stage such that the most expensive stage is as cheap as can be, and the rest as even as can be.

    No stage is left without a block as long as there are enough.
    """
    n, least = len(costs.blocks), int(len(costs.blocks) >= stages)
    total = [0.0]
    for cost in costs.blocks:
        total.append(total[-1] + cost)
    # best[k]: (most expensive stage, sum of squares, counts) of the first stages holding k blocks
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ()), *((inf, inf, ()) for _ in range(n))]
    for stage in range(stages):
        extra = (costs.first if stage == 0 else 0) + (costs.last if stage == stages - 1 else 0)
        best = [
            min(
                (max(best[a][0], cost), best[a][1] + cost * cost, (*best[a][2], k - a))
                for a in range(k + 1)
                for cost in (total[k] - total[a] + extra if k - a >= least else inf,)
            )
            for k in range(n + 1)
        ]
    return list(best[n][2])


def check_counts(counts: Sequence[int], num_layers: int, stages: int) -> None:
    """Refuses counts that do not deal every block to exactly the stages there are."""
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 0:
        raise refuse(
            f"num_layers {num_layers} over {stages} pipeline stages as {list(counts)}",
            f"the stages must be {stages} counts >= 0 that sum to {num_layers}, these sum to {sum(counts)}",
            "--layers-per-stage with counts that sum to num_layers, or leave it out for an even split",
        )


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
