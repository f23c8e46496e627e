"""Parameters that several stages hold, or one stage uses at several places: which, and on which stages. PURE.

All holders begin with the same values, sum their gradients in full before anything is sharded, and cut the parameter
into the same shards, so that their copies stay bitwise equal. The first holder counts and saves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isotron.core.layout import Table

Holders = dict[str, tuple[int, ...]]


def holders(config: Any, table: Table, split: Sequence[range]) -> Holders:
    """Global name -> numbers of the stages that hold it, ascending. `split`: the blocks of each stage.

    A family whose stages share more than the ends of the model says so itself: `config.holders(split)`.
    """
    own = getattr(config, "holders", None)
    if own is not None:
        found: Holders = own(split)
        return found
    return {name: tuple(dict.fromkeys((0, len(split) - 1))) for name in sorted(dict(table.ties).values())}
