"""Microbatches: which sample goes where, what every slot means, and reading ahead."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from isotron.core.errors import Refused
from isotron.data.batches import Prefetcher, make_batch, microbatches
from isotron.data.config import DataConfig

EOD = 9
ROOT = Path(__file__).resolve().parents[2]


class Numbered:
    """Sample i is i, i + 1, ..., so that a row tells its number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(index, index + 5)


CONFIG = DataConfig(seq_length=4)


def ids(consumed: int, global_batch: int, micro: int, rank: int, dp: int) -> list[list[int]]:
    batches = microbatches(Numbered(1000), consumed, global_batch, micro, rank, dp, CONFIG, None)
    for batch in batches:
        assert batch.tokens[:, 0].tolist() == batch.sample_ids.tolist()
        assert torch.equal(batch.labels, batch.tokens + 1) and batch.shape == (micro, 4)
    return [batch.sample_ids.tolist() for batch in batches]


def test_places_of_the_samples() -> None:
    assert ids(0, 8, 2, 0, 2) == [[0, 1], [4, 5]] and ids(0, 8, 2, 1, 2) == [[2, 3], [6, 7]]
    assert ids(8, 4, 1, 0, 1) == [[8], [9], [10], [11]]


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (3, 2), (1, 4), (2, 6)])
def test_every_sample_once_for_any_number_of_ranks(micro: int, dp: int) -> None:
    ranks = [ids(24, 12, micro, rank, dp) for rank in range(dp)]
    in_order = [i for step in zip(*ranks, strict=True) for batch in step for i in batch]
    assert in_order == list(range(24, 36))


def row(**options: bool) -> dict[str, list[float]]:
    """The worked example: 13 ids, so 12 slots; documents [1 2 3 9], [9], [4 5 9], [6 7 8 ...]."""
    text = np.array([1, 2, 3, EOD, EOD, 4, 5, EOD, 6, 7, 8, 1, EOD])
    batch = make_batch([text], range(1), DataConfig(seq_length=12, **options), EOD)  # type: ignore[arg-type]
    assert batch.tokens.tolist() == [text[:-1].tolist()] and batch.labels.tolist() == [text[1:].tolist()]
    documents = [] if batch.doc_ids is None else batch.doc_ids[0].tolist()
    return {"loss": batch.loss_mask[0].tolist(), "positions": batch.positions[0].tolist(), "documents": documents}


def test_twelve_tokens_worked_by_hand() -> None:
    plain = {"loss": [1.0] * 12, "positions": list(range(12)), "documents": []}
    # tokens               1  2  3  E  E  4  5  E  6  7  8  1
    loss = [float(x) for x in (1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1)]
    positions = [0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 2, 3]
    documents = [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]
    assert row() == plain
    assert row(eod_mask_loss=True) == plain | {"loss": loss}
    assert row(reset_position_ids=True) == plain | {"positions": positions}
    assert row(reset_attention_mask=True) == plain | {"documents": documents}
    assert row(eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True) == {
        "loss": loss,
        "positions": positions,
        "documents": documents,
    }


def test_types() -> None:
    config = DataConfig(seq_length=4, reset_attention_mask=True, reset_position_ids=True)
    batch = make_batch(Numbered(9), range(2), config, EOD)
    assert batch.doc_ids is not None and batch.loss_mask.dtype == torch.float32
    for tensor in (batch.tokens, batch.labels, batch.positions, batch.sample_ids, batch.doc_ids):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_the_label_that_is_an_end_keeps_its_loss() -> None:
    batch = make_batch([np.array([5, 6, 0, 7, 0])], range(1), DataConfig(seq_length=4), 0)  # type: ignore[arg-type]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1]]  # masking goes by place, never by the value of a pad id


def test_refusals() -> None:
    for sizes in ((7, 2, 2), (0, 1, 1), (4, 0, 1)):
        with pytest.raises(Refused, match="--global-batch-size"):
            microbatches(Numbered(100), 0, *sizes[:2], 0, sizes[2], CONFIG, None)
    with pytest.raises(Refused, match="--global-batch-size 8"):
        microbatches(Numbered(100), 0, 7, 2, 0, 2, CONFIG, None)
    with pytest.raises(Refused, match="samples 8..11\nbut: .*built for 10 samples") as refused:
        microbatches(Numbered(10), 8, 4, 1, 0, 4, CONFIG, None)
    assert refused.value.exit_code == 1
    with pytest.raises(Refused, match="--eod-mask-loss --reset-position-ids"):
        make_batch(Numbered(9), range(1), DataConfig(seq_length=4, eod_mask_loss=True, reset_position_ids=True), None)
    with pytest.raises(ValueError, match="has 5 tokens, seq_length 8 needs 9"):
        make_batch(Numbered(9), range(1), DataConfig(seq_length=8), None)


def test_prefetching_keeps_order_and_reads_ahead() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for i in range(5):
            made.append(i)
            yield i

    with Prefetcher(source()) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:  # two wait in the queue, one in the thread's hand
            time.sleep(0.01)
        assert made == [0, 1, 2, 3]
        assert next(ahead) == 1 and ahead.waited < 0.5  # it was there
        assert list(ahead) == [2, 3, 4] and list(ahead) == []


def test_the_time_that_a_step_waits_is_known() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait()
        yield 1

    with Prefetcher(source()) as ahead:
        threading.Timer(0.2, gate.set).start()
        assert next(ahead) == 1 and ahead.waited >= 0.1


PARENT = """
import sys, threading, time
from isotron.data.batches import Prefetcher

def endless():
    while True:
        yield 1

with Prefetcher(endless()) as feed:
    next(feed)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_takes_its_reader_with_it() -> None:
    """Reading ahead is a thread: no process is left that a signal could miss or that could outlive its parent."""
    program = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    assert program.stdout is not None and program.stdout.readline() == b"ready\n"
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    assert not children.exists() or not children.read_text().strip()
    program.kill()
    assert program.wait(10) == -signal.SIGKILL
    program.stdout.close()


def test_errors_of_the_source_reach_the_consumer() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken file")

    with Prefetcher(source()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(RuntimeError, match="broken file"):
            next(ahead)
        assert list(ahead) == []


def test_closing_early_ends_the_thread() -> None:
    before = threading.active_count()

    def forever() -> Iterator[int]:
        while True:
            yield 1

    ahead = Prefetcher(forever())
    assert next(ahead) == 1
    ahead.close()
    ahead.close()
    assert threading.active_count() == before and list(ahead) == []
