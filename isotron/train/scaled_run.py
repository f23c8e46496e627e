"""The split and the optimizer of a run scaled down for `isotron verify`: the same kinds of stages, the same rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from isotron.config.schema import RunConfig
from isotron.core.optim.build import shapes_of
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.groups import Override, parse, settle
from isotron.core.parallel.plan import split_layers
from isotron.core.parallel.split import counts_of, model_costs, tidy
from isotron.train.verify import Case


def scaled_split(config: RunConfig, stages: int) -> tuple[float, ...]:
    """Blocks of each of so many stages, where the run names its own or cuts some: none where it has none, one where it
    has fewest of all, else two; cut where they are. Of more stages the first ones and the last.
    """
    own = config.layout
    split = split_layers(config.model.num_layers, own, model_costs(config.model))
    stops = list(accumulate(counts_of(split)))
    cut = [stop % 1 > 0 for stop in stops]  # the block in which a stage ends
    if not (own.layers_per_stage or own.pipeline_layout or any(cut)):
        return ()
    begun = [ceil(b) - ceil(a) for a, b in pairwise((0, *stops))]
    picked = [*begun[: stages - 1], begun[-1]]
    most = max(picked)
    small = [min(n, 1 if n < most and n == min(filter(None, picked)) else 2) for n in picked]
    inner = [*cut[: max(stages - 2, 0)], any(cut[max(stages - 2, 0) : -1])][: stages - 1]
    found: list[float] = [0]
    for ends_in_one, stop in zip((*inner, False), accumulate(small), strict=True):
        found.append(max(found[-1], stop - ends_in_one / 2))
    return tuple(tidy(b - a) for a, b in pairwise(found)) if sum(small) > 1 else ()


def scaled_optim(config: RunConfig, small: Any) -> OptimConfig:
    """The rules of the run's optimizer for the model `small`. Patterns that match nothing in the run's own model are
    refused, those that match nothing in the small one left out. States are wide: rounding would hide a wrong layout.
    """
    own = config.optim
    settle(shapes_of(config.model, config.layout), own)
    names = list(shapes_of(small, config.layout))

    def met(pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in names)

    groups = {word: parse(word) for word in own.param_groups}
    return replace(
        own,
        adam_eps=max(own.adam_eps, Case.optim.adam_eps),  # see there
        exp_avg_dtype="float32",
        exp_avg_sq_dtype="float32",
        master_remainders=False,
        freeze=tuple(filter(met, own.freeze)),
        param_groups=tuple(word for word, o in groups.items() if isinstance(o, Override) and met(o.pattern)),
    )


def changed_rules(config: RunConfig, small: OptimConfig) -> Iterable[tuple[str, str, str]]:
    """(option, the run's, the tested value) of what the report says of the optimizer."""
    own = config.optim
    for name in ("optimizer", "freeze", "param_groups", "exp_avg_dtype", "exp_avg_sq_dtype"):
        mine, tested = (getattr(cfg, name) for cfg in (own, small))
        if name == "optimizer" or mine != tested or (isinstance(mine, tuple) and mine):
            yield name, _text(mine), _text(tested)


def _text(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)
