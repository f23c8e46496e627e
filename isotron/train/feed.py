"""Which samples each step takes: batch sizes that grow, stretches of data that are left out. PURE.

A step takes `size` samples from place `start` on, in consumption order. Both follow from the place alone, so a run that
is resumed anywhere goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isotron.core.errors import refuse
from isotron.train.config import TrainConfig


def batch_size(train: TrainConfig, consumed: int) -> int:
    """Samples of the step that begins at place `consumed`.

    With --rampup-batch-size START INCREMENT SAMPLES it grows from START by INCREMENT after equal numbers of samples,
    and is --global-batch-size after SAMPLES.
    """
    if not train.rampup_batch_size:
        return train.global_batch_size
    start, increment, samples = train.rampup_batch_size
    rises = (train.global_batch_size - start) // increment
    if consumed >= samples or rises == 0:
        return train.global_batch_size
    return min(start + increment * (consumed * rises // samples), train.global_batch_size)


def steps(train: TrainConfig, consumed: int, count: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the next `count` steps behind place `consumed`.

    A step that would touch a range of --skip-samples begins behind that range instead.
    """
    ranges = skipped_ranges(train.skip_samples)
    for _ in range(count):
        size = batch_size(train, consumed)
        for first, last in ranges:
            if consumed <= last and first < consumed + size:
                consumed = last + 1
                size = batch_size(train, consumed)
        yield consumed, size
        consumed += size


def end_of(train: TrainConfig, consumed: int, count: int) -> int:
    """The place behind the next `count` steps."""
    if count <= 0:
        return consumed
    if not train.rampup_batch_size and not train.skip_samples:
        return consumed + count * train.global_batch_size
    *_, (start, size) = steps(train, consumed, count)
    return start + size


def skipped_ranges(words: Sequence[str]) -> list[tuple[int, int]]:
    """(first, last) of words such as 1000-1999, in order; refused where one is no range."""
    found = []
    for word in words:
        first, dash, last = word.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            case = "a range is FIRST-LAST, places in consumption order as metrics.jsonl has them in sample_ids"
            raise refuse(f"--skip-samples {' '.join(words)}", case, "--skip-samples 1000-1999")
        found.append((int(first), int(last)))
    return sorted(found)
