"""Pairwise covering sets: few cases in which every legal pair of values of any two axes occurs together. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Group = tuple[tuple[str, Any], ...]
# what every family is tried with beside its layouts
OF_A_STEP: dict[str, tuple[Any, ...]] = {
    "microbatch": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
}


def product_of(axes: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Every legal combination."""
    everything = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [case for case in everything if legal(case)]


def pairs_of(case: Case, size: int = 2) -> set[Group]:
    """The pairs of values that occur in a case, or groups of another size."""
    return set(combinations(case.items(), size))


def covering(
    axes: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool] = lambda case: True, size: int = 2
) -> list[Case]:
    """Greedy: again and again the legal case with the most pairs (or groups of another size) that no earlier case has.
    Deterministic.
    """
    left = [(case, pairs_of(case, size)) for case in product_of(axes, legal)]
    missing = set().union(*(pairs for _, pairs in left)) if left else set()
    chosen: list[Case] = []
    while missing:
        gains = [len(pairs & missing) for _, pairs in left]
        case, pairs = left[gains.index(max(gains))]
        chosen.append(case)
        missing -= pairs
        left = [entry for entry in left if entry[1] & missing]
    return chosen


def uncovered(
    cases: Sequence[Case], axes: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool] = lambda case: True
) -> set[Group]:
    """Pairs that some legal case has and none of `cases`."""
    wanted = set().union(*(pairs_of(case) for case in product_of(axes, legal)))
    return wanted - set().union(*(pairs_of(case) for case in cases))
