"""Rules on what is sharded over data-parallel ranks. PURE."""

from __future__ import annotations

from isotron.config.rules import Facts, Rule, asked, moved, nearest_divisor
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem
from isotron.core.nn.moe_config import MoEConfig


def _shard_size(c: RunConfig, f: Facts) -> Problem:
    dp = c.layout.data_ranks
    case = f"the {dp} data-parallel ranks are cut into groups of this size, and the groups must be equal"
    return Problem(
        asked(c, "zero_shard_size", "dp"), case, f"--zero-shard-size {nearest_divisor(dp, c.layout.zero_shard_size)}"
    )


def _shard_nothing(c: RunConfig, f: Facts) -> Problem:
    case = "it says over how many ranks shards are spread, and --zero 0 or one data-parallel rank has no shards"
    return Problem(asked(c, "zero_shard_size", "zero", "dp"), case, "--zero-shard-size 0")


def _shard_experts(c: RunConfig, f: Facts) -> Problem:
    copies = c.layout.expert_data_ranks
    case = f"the {copies} ranks that hold the same experts are cut into groups of this size, and they must be equal"
    given = asked(c, "zero_shard_size", "ep", *moved(c, "etp"), "tp", "dp")
    return Problem(given, case, f"--zero-shard-size {nearest_divisor(copies, c.layout.zero_shard_size)}")


ZERO_RULES: tuple[Rule, ...] = (
    Rule("shards divide the ranks", ("zero_shard_size", "dp"),
         lambda c, f: c.layout.zero_stage > 0 and c.layout.zero_shard_size > 0
         and c.layout.data_ranks % c.layout.zero_shard_size != 0, _shard_size),
    Rule("shards divide the experts' ranks", ("zero_shard_size", "ep", "etp", "tp", "dp"),
         lambda c, f: isinstance(c.model, MoEConfig) and c.layout.data_ranks % max(c.layout.zero_shard_size, 1) == 0
         and c.layout.expert_data_ranks % c.layout.expert_shard_ranks != 0, _shard_experts),
    Rule("shards to be spread", ("zero_shard_size", "zero", "dp"),
         lambda c, f: c.layout.zero_shard_size > 0 and c.layout.zero_stage == 0, _shard_nothing),
)  # fmt: skip
