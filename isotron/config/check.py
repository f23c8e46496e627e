"""Check a whole config before any process starts: every broken rule at once. PURE.

`finish` fills what depends on other values or on the world; `check` applies the declared rules to the finished config.
"""

from __future__ import annotations

from collections.abc import Collection

from isotron.config.catalogue import catalogue
from isotron.config.rules import RANGES, Facts, Rule
from isotron.config.rules_context import CONTEXT_RULES
from isotron.config.rules_experts import EXPERT_RULES, PATTERN_RULE
from isotron.config.rules_layout import LAYOUT_RULES
from isotron.config.rules_pipeline import PIPELINE_RULES
from isotron.config.rules_run import RUN_RULES
from isotron.config.rules_saves import SAVE_RULES
from isotron.config.rules_streams import LONG_RULE, SHORTEST_RULE, STREAM_RULES
from isotron.config.rules_words import WORD_RULES
from isotron.config.rules_zero import ZERO_RULES
from isotron.config.schema import RunConfig, changed, value
from isotron.core.errors import Problem
from isotron.core.models.t5_config import T5Config
from isotron.data.spans import target_length

# what every other rule must be able to rely on
FIRST: tuple[Rule, ...] = (*RANGES, PATTERN_RULE, SHORTEST_RULE, LONG_RULE)
RULES: tuple[Rule, ...] = (
    *(*FIRST, *LAYOUT_RULES, *ZERO_RULES, *CONTEXT_RULES),
    *(*EXPERT_RULES, *PIPELINE_RULES, *RUN_RULES, *SAVE_RULES, *STREAM_RULES, *WORD_RULES),
)


def check(
    config: RunConfig, world_size: int | None = None, device_count: int = 0, vocab_size: int = 0,
    skip: Collection[str] = (), own_tokenizer: str = "",
) -> list[Problem]:  # fmt: skip
    """Every problem of a run. world_size: processes of a launcher, None when isotron starts them; device_count:
    accelerators of this machine; vocab_size: the tokenizer's, 0 if unknown; skip: leaves that are not looked at;
    own_tokenizer: the checkpoint's.
    """
    return broken(config, Facts(world_size, device_count, vocab_size, own_tokenizer), skip)


def broken(config: RunConfig, facts: Facts, skip: Collection[str] = ()) -> list[Problem]:
    """Like `check`, with the facts as one value."""
    problems, bad = [], set(skip)
    for rule in FIRST:
        if not bad.intersection(rule.leaves) and rule.broken(config, facts):
            problems.append(rule.problem(config, facts))
            bad.update(rule.leaves)
    # what is wrong by itself is replaced, so that the rest can still be looked at
    legal = {leaf: catalogue()[leaf].default for leaf in bad if leaf in catalogue() and value(config, leaf) is not None}
    config = changed(config, **legal)
    config = finish(config, facts.world_size, facts.device_count, facts.tokenizer_vocab)
    for rule in RULES[len(FIRST) :]:
        # a value that is out of range breaks every rule about it: one problem is enough
        if not bad.intersection(rule.leaves) and rule.broken(config, facts):
            problems.append(rule.problem(config, facts))
    return problems


def finish(
    config: RunConfig, world_size: int | None = None, device_count: int = 0, vocab_size: int = 0
) -> RunConfig:  # fmt: skip
    """The config with every value that follows from others: dp, zero, batch, positions, decay, vocabulary."""
    layout = config.layout
    dp = layout.dp or _default_dp(config, world_size, device_count)
    leaves = {
        "dp": dp,
        "zero": int(dp * layout.cp > 1) if layout.zero == -1 else layout.zero,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "global_batch_size": config.train.global_batch_size or config.train.micro_batch_size * dp,
        "max_position_embeddings": config.model.max_position_embeddings or config.data.seq_length,
        "lr_decay_iters": config.schedule.lr_decay_iters or config.train.train_iters,
        "vocab_size": config.model.vocab_size or vocab_size,
    }
    if isinstance(config.model, T5Config):
        leaves["decoder_seq_length"] = config.model.decoder_seq_length or target_length(config.data)
    return changed(config, **leaves)


def _default_dp(config: RunConfig, world_size: int | None, device_count: int) -> int:
    """What the launcher's processes leave; else, on devices, the most that the batch divides into; 1 on CPU."""
    unit = config.layout.tp * config.layout.pp * config.layout.cp
    if world_size is not None:
        return max(1, world_size // unit)
    if config.train.device == "cpu":
        return 1
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    fits = [d for d in range(1, device_count // unit + 1) if not batch or batch % (micro * d) == 0]
    return fits[-1] if fits else 1
