"""Blending several datasets, and how a `--data-path` is read. PURE.

Weights are shares of samples. The order (`blend_order`) is Megatron's greedy one: sample t comes from the dataset that
lags most behind its share of the t samples before it, so every prefix of the order keeps the shares to within about
one sample.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse
from isotron.data.gpt_dataset import Dataset

SURPLUS = 0.005  # more samples are built per dataset than its share, as in Megatron
SUFFIX = "_text_document"
ANSWERS = ".answers"  # ends the prefix of a pair that says which ids of another carry loss


@dataclass(frozen=True)
class Sources:
    """Prefixes of .bin/.idx pairs and their weights; without weights they count by their sizes."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


class BlendedDataset:
    """Samples of several datasets: `which` dataset, and which sample `within` it, for every sample."""

    def __init__(
        self, datasets: Sequence[Dataset], which: npt.NDArray[np.integer], within: npt.NDArray[np.int64]
    ) -> None:
        self.datasets, self.which, self.within = datasets, which, within

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> Any:
        return self.datasets[int(self.which[index])][int(self.within[index])]


class ChainedDataset:
    """The first `count` samples of each of several datasets, one after the other; parts are (count, dataset)."""

    def __init__(self, parts: Sequence[tuple[int, Dataset]]) -> None:
        self.parts = list(parts)
        self.starts = list(accumulate((count for count, _ in self.parts), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect_right(self.starts, index) - 1
        return self.parts[which][1][index - self.starts[which]]


def normalized(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum."""
    values = np.asarray(weights, dtype=np.float64)
    return [float(share) for share in values / np.sum(values)]


def targets(shares: Sequence[float], size: int, surplus: float = 0.0) -> list[int]:
    """Samples of each dataset for a blend of `size`, plus the surplus."""
    return [math.ceil(math.ceil(size * share) * (1 + surplus)) for share in shares]


def read_sources(paths: Sequence[str], option: str, log: Callable[[str], None]) -> Sources:
    """`prefix ...` or `weight prefix weight prefix ...` as sources; a weight of 0 leaves its prefix out."""
    numbers = [_number(word) for word in paths[::2]]
    if len(paths) % 2 or not paths or any(number is None for number in numbers):
        if any(number is not None and not _exists(word) for word, number in zip(paths[::2], numbers, strict=True)):
            raise refuse(
                f"{option} {' '.join(paths)}",
                "either every prefix has a weight before it, or none has",
                f"{option} 0.7 PREFIX 0.3 PREFIX",
            )
        return Sources(tuple(prefix for path in paths for prefix in find_prefixes(path, option)), None)
    weights = [number for number in numbers if number is not None]
    if any(not 0 <= weight < math.inf for weight in weights) or sum(weights) <= 0:
        raise refuse(
            f"{option} {' '.join(paths)}",
            "weights are finite numbers >= 0, not all 0",
            f"{option} 0.7 {paths[1]} ...",
        )
    kept = []
    for weight, path in zip(weights, paths[1::2], strict=True):
        found = find_prefixes(path, option)
        if len(found) > 1:
            case = f"the directory holds {len(found)} datasets"
            raise refuse(f"{option} {weight} {path}", case, f"a weight for each: {option} 0.5 {found[0]} 0.5 ...")
        if weight == 0:
            log(f"{path} has the weight 0 and is left out")
        else:
            kept.append((found[0], weight))
    return Sources(tuple(prefix for prefix, _ in kept), tuple(weight for _, weight in kept))


def find_prefixes(path: str, option: str) -> list[str]:
    """The prefix that `path` means: itself, with `_text_document`, without .bin/.idx; all of them for a directory."""
    plain = str(Path(path.strip()).expanduser())
    stem = plain[:-4] if plain.endswith((".bin", ".idx")) else plain
    for prefix in (stem, stem + SUFFIX):
        if Path(prefix + ".idx").is_file():
            return [prefix]
    if Path(plain).is_dir():
        found = sorted(str(idx)[:-4] for idx in Path(plain).glob("*.idx") if not idx.name.endswith(f"{ANSWERS}.idx"))
        if found:
            return found
        raise refuse(f"{option} {path}", f"the directory {Path(plain).absolute()} holds no .idx file", _FIX)
    if Path(plain).is_file():
        raise refuse(f"{option} {path}", "it is a file of another kind, training reads .bin/.idx pairs", _FIX)
    case = f"there is neither {Path(stem).absolute()}.idx nor {Path(stem).name}{SUFFIX}.idx beside it"
    raise refuse(f"{option} {path}", case, _FIX)


_FIX = "isotron preprocess --input FILE.jsonl --output-prefix my_gpt, then --data-path my_gpt"


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _exists(path: str) -> bool:
    return any(Path(path + end).is_file() for end in (".idx", SUFFIX + ".idx")) or Path(path).is_dir()
