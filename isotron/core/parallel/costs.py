"""What the stages of a model cost in a layout, for the search of a pipeline schedule. PURE."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from isotron.core.parallel.plan import Layout, split_layers
from isotron.core.parallel.split import ATTENTION, MLP, counts_of, halves_of, model_costs

FINE = 1000  # the most expensive stage, in the unit of the costs


def costed(config: Any, layout: Layout) -> Layout:
    """The layout with the costs that its search for a schedule needs, if it has one and no costs are given."""
    searches = layout.schedule == "auto" and layout.schedule_memory > 0 and layout.pp > 1
    return (
        replace(layout, schedule_costs=modelled(config, layout)) if searches and not layout.schedule_costs else layout
    )


def unread_products(config: Any, layout: Layout) -> float:
    """Multiply-adds per token and average block that a second forward under full recompute leaves out: the last product
    of a unit's last MLP, which nothing reads (`PreNormBlock.unasked`). None where a norm or experts stand there.
    """
    rules = config.layout(max(config.vocab_size, 1)).rules
    if getattr(config, "norms_after", False) or any("mlp_post_norm" in rule.pattern for rule in rules):
        return 0.0
    own = [rule for rule in rules if fnmatchcase(rule.pattern, "layers.*.mlp.down.weight")]
    share = sum(prod(r.shape) * (config.num_layers if "*" in r.pattern else 1) for r in own) / config.num_layers
    return share / (1 if layout.recompute_method == "block" else layout.recompute_num_layers)


def modelled(config: Any, layout: Layout) -> tuple[int, ...]:
    """Forward, input gradient, weight gradient, transfer (0) and what is kept, of one stage after the other.

    Counted are multiply-adds. The output layer's three products are all formed with the loss, in the forward; scores of
    attention have no weights and cost twice as much backward; under full recompute a backward begins with a
    forward, but for what nothing reads.
    """
    costs = model_costs(config)
    split = split_layers(config.num_layers, layout, costs)
    unread = unread_products(config, layout)
    if hasattr(config, "block_tokens"):  # costs are of pairs, not of tokens
        unread *= config.block_tokens(max(config.max_position_embeddings, 1)) / config.num_layers
    rows, counts = [], counts_of(split)
    parts = 2 if any(n % 1 for n in counts) else 1  # of a block, in which what is kept is counted
    for s, blocks in enumerate(split):
        halves = halves_of(split, s)
        scores = sum(costs.scores[i] for i, half in zip(blocks, halves, strict=True) if half != MLP)
        all_ = sum(costs.of(i, half) for i, half in zip(blocks, halves, strict=True))
        head, other = (costs.head, costs.last - costs.head) if s == len(split) - 1 else (0.0, 0.0)
        matrices = all_ - scores + other
        last_products = sum(half != ATTENTION for half in halves)
        again = all_ - unread * last_products if layout.recompute == "full" else 0.0
        rows.append((matrices + scores + 3 * head, matrices + 2 * scores + again, matrices, round(parts * counts[s])))
    unit = max(sum(row[:3]) for row in rows) / FINE
    return tuple(n for f, b, w, kept in rows for n in (round(f / unit), round(b / unit), round(w / unit), 0, kept))
