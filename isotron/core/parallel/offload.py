"""What of a rank's state lives in host memory or on disk instead of on the device. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """fraction: of the elements that this rank steps, whose masters and moments live on the host and are stepped there.
    directory: of files for them, empty for host memory. weights: under ZeRO-3, the own run lives in host memory too, or
    in files of `weights_directory`. gradients: sums that are not kept whole (ZeRO-2 and 3) live in host memory.
    """

    fraction: float = 0.0
    directory: str = ""
    weights: bool = False
    weights_directory: str = ""
    gradients: bool = False


def hosted(sizes: Sequence[int], fraction: float) -> int:
    """How many of the tensors that a rank steps, from the first on, are stepped on the host: the fewest that make up
    `fraction` of all elements.
    """
    wanted, taken = fraction * sum(sizes), 0
    for count, size in enumerate(sizes):
        if taken >= wanted:
            return count
        taken += size
    return len(sizes)
