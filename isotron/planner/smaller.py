"""What of a model or a batch that does not fit is too large: sizes that would fit, and the largest tensor. PURE."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from isotron.config.check import check
from isotron.config.rules import flag
from isotron.config.schema import RunConfig, changed, value
from isotron.planner.job import Job
from isotron.planner.parameters import rank_stages

MOST = 3  # sizes that are named
Fits = Callable[[RunConfig], bool]

# of what each size is a multiple of
_UNITS: dict[str, Callable[[RunConfig], int]] = {
    "num_layers": lambda c: c.layout.stages,
    "encoder_num_layers": lambda c: c.layout.stages,
    "seq_length": lambda c: 2 * c.layout.tp * c.layout.cp,
    "ffn_hidden_size": lambda c: 8 * c.layout.tp,
    "num_experts": lambda c: c.layout.ep,
    "vocab_size": lambda c: c.layout.tp,
    "hidden_size": lambda c: 2 * c.model.num_attention_heads,
}


def smaller_sizes(config: RunConfig, fits: Fits) -> list[str]:
    """Options each of which, by itself, makes a finished config fit; the largest of doubled values that does."""
    before = len(check(config))

    def works(other: RunConfig) -> bool:
        return fits(other) and len(check(other)) <= before

    found = (_largest(config, leaf, unit(config), works) for leaf, unit in _UNITS.items())
    return [words for words in found if words][:MOST]


def _largest(config: RunConfig, leaf: str, unit: int, works: Fits) -> str:
    now = value(config, leaf)
    read = leaf == "vocab_size" and any((config.tokenizer.tokenizer_model, config.tokenizer.vocab_file))
    if not now or read:
        return ""
    # where there are as many positions as tokens, nobody may have named them
    together = leaf == "seq_length" and config.model.max_position_embeddings == now
    leaves = [leaf, *["max_position_embeddings"] * together]
    low, high = -1, ((now - 1) // unit).bit_length()  # doublings that work, and that do not or are not less
    while high - low > 1:
        middle = (low + high) // 2
        if works(changed(config, **dict.fromkeys(leaves, unit << middle))):
            low = middle
        else:
            high = middle
    return " ".join(f"{flag(name)} {unit << low}" for name in leaves) if low >= 0 else ""


def largest_tensor(job: Job) -> tuple[str, tuple[int, ...], int]:
    """Name, local shape and elements of the largest tensor that a rank has."""
    parts = (part for rank in range(job.layout.pp) for part in rank_stages(job.config, job.layout, rank))
    shapes = ((placed.name, tuple(placed.shard.shape)) for part in parts for placed in part.placed.values())
    name, shape = max(shapes, key=lambda x: prod(x[1]))
    return name, shape, prod(shape)
