"""Which dataset each sample of a blend comes from: Megatron's greedy order, bit for bit, also of thousands. PURE.

Sample t comes from the dataset whose lag, weight * max(t, 1) - samples drawn from it, is largest; the first of them
where several are. With many datasets most are far from being drawn: over the next BLOCK samples a lag grows to no more
than what it is at their end, so only those with the largest lags there are looked at, as long as the winner's lag is
above what any other can have. Rounding keeps order, so the comparison is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Order: TypeAlias = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]
FEW = 16  # so many datasets are looked at faster without numpy
BLOCK = 128  # samples between two choices of what is looked at
CANDIDATES = 512


def blend_order(shares: Sequence[float], size: int) -> Order:
    """(dataset, sample of that dataset) for each of `size` samples; ties go to the first dataset."""
    which: npt.NDArray[np.integer] = np.empty(size, dtype=np.int16 if len(shares) < 32767 else np.int32)
    within: npt.NDArray[np.int64] = np.empty(size, dtype=np.int64)
    if len(shares) > FEW:
        _among_many(np.asarray(shares, dtype=np.float64), which, within)
    else:
        _among_few(list(map(float, shares)), which, within)
    return which, within


def _among_few(weights: list[float], which: npt.NDArray[np.integer], within: npt.NDArray[np.int64]) -> None:
    taken, numbers = [0] * len(weights), range(1, len(weights))
    for t in range(len(which)):
        scale, chosen = float(t or 1), 0
        most = weights[0] * scale - taken[0]
        for k in numbers:
            lag = weights[k] * scale - taken[k]
            if lag > most:
                most, chosen = lag, k
        which[t], within[t] = chosen, taken[chosen]
        taken[chosen] += 1


def _among_many(
    weights: npt.NDArray[np.float64], which: npt.NDArray[np.integer], within: npt.NDArray[np.int64]
) -> None:
    drawn, everything = np.zeros(len(weights)), np.arange(len(weights))
    start, useful = 0, len(weights) > CANDIDATES
    while start < len(which):
        stop = min(start + BLOCK, len(which))
        looked_at, others = everything, -np.inf
        if useful:
            at_end = weights * float(stop) - drawn
            cut = len(weights) - CANDIDATES
            order = np.argpartition(at_end, cut - 1)
            looked_at, others = np.sort(order[cut:]), at_end[order[cut - 1]]
        counts = drawn[looked_at]
        reached = _draw(weights[looked_at], counts, looked_at, float(others), range(start, stop), which, within)
        drawn[looked_at] = counts
        # lags that are all alike (at the start, or equal weights) are told apart only by looking at everything
        useful = len(weights) > CANDIDATES and (not useful or reached - start > BLOCK // 4)
        start = reached


def _draw(
    weights: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    names: npt.NDArray[np.int64],
    others: float,
    samples: range,
    which: npt.NDArray[np.integer],
    within: npt.NDArray[np.int64],
) -> int:
    """Draw `samples` from the datasets `names`, until one may have to come from another; the sample that does."""
    lag = np.empty(len(weights))
    for t in samples:
        np.multiply(weights, float(t or 1), out=lag)
        np.subtract(lag, counts, out=lag)
        chosen = lag.argmax()
        if not lag[chosen] > others:
            return t
        which[t], within[t] = names[chosen], counts[chosen]
        counts[chosen] += 1.0
    return samples.stop
