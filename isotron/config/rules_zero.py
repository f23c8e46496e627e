"""Rules on what is sharded over data-parallel ranks. PURE."""

from __future__ import annotations

from isotron.config.rules import Facts, Rule, asked, nearest_divisor
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem


def _shard_size(c: RunConfig, f: Facts) -> Problem:
    dp = c.layout.data_ranks
    case = f"the {dp} data-parallel ranks are cut into groups of this size, and the groups must be equal"
    return Problem(
        asked(c, "zero_shard_size", "dp"), case, f"--zero-shard-size {nearest_divisor(dp, c.layout.zero_shard_size)}"
    )


def _shard_nothing(c: RunConfig, f: Facts) -> Problem:
    case = "it says over how many ranks shards are spread, and --zero 0 or one data-parallel rank has no shards"
    return Problem(asked(c, "zero_shard_size", "zero", "dp"), case, "--zero-shard-size 0")


ZERO_RULES: tuple[Rule, ...] = (
    Rule("shards divide the ranks", ("zero_shard_size", "dp"),
         lambda c, f: c.layout.zero_stage > 0 and c.layout.zero_shard_size > 0
         and c.layout.data_ranks % c.layout.zero_shard_size != 0, _shard_size),
    Rule("shards to be spread", ("zero_shard_size", "zero", "dp"),
         lambda c, f: c.layout.zero_shard_size > 0 and c.layout.zero_stage == 0, _shard_nothing),
)  # fmt: skip
