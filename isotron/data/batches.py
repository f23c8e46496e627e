"""From samples to the microbatches of a step: the one file of this room that builds tensors.

Sample order is a pure function of (seed, place in consumption order): microbatch j of a step that starts after
`consumed` samples holds, on data-parallel rank d, the samples consumed + j * (micro_batch * dp) + d * micro_batch + i.
The state of a loader is therefore one integer, and does not depend on the number of ranks.

What each slot of a row means (`tests/local/test_data_batches.py` has an example of 12 tokens): tokens = text[:-1] and
labels = text[1:]. An end-of-document id belongs to the document that it ends. With eod_mask_loss the slot whose input
is that id has no loss: its label begins another document. With reset_position_ids the slot behind it has position 0.
With reset_attention_mask doc_ids count the documents of a row from 0. Only positions in the row decide, never a pad id.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from isotron.core.batch import Batch
from isotron.core.errors import refuse
from isotron.data.config import DataConfig
from isotron.data.gpt_dataset import Dataset
from isotron.data.rows import Pair, Row, Tokens, document_starts

T = TypeVar("T")
Bools: TypeAlias = npt.NDArray[np.bool_]


def microbatches(
    dataset: Dataset,
    consumed: int,
    global_batch: int,
    micro_batch: int,
    dp_rank: int,
    dp: int,
    cfg: DataConfig,
    eod: int | None,
) -> list[Batch]:
    """The microbatches of one step on one data-parallel rank; sizes in sequences, tensors on the CPU.

    Refused: a global batch that micro_batch x dp does not divide, or a dataset with fewer than consumed + global_batch
    samples (all ranks see the same numbers, so all of them stop).
    """
    _check_batch(global_batch, micro_batch, dp)
    if consumed + global_batch > len(dataset):
        raise refuse(
            f"samples {consumed}..{consumed + global_batch - 1}",
            f"the data was built for {len(dataset)} samples",
            "a larger sample count (train_iters x global_batch_size) when the data is built",
            exit_code=1,
        )
    width = micro_batch * dp
    starts = range(consumed + dp_rank * micro_batch, consumed + global_batch, width)
    return [make_batch(dataset, range(start, start + micro_batch), cfg, eod) for start in starts]


def make_batch(dataset: Dataset, numbers: range, cfg: DataConfig, eod: int | None) -> Batch:
    """The samples `numbers` as one microbatch, with masks, positions and documents as the options say."""
    samples = [dataset[number] for number in numbers]
    if isinstance(samples[0], Row):
        return _batch_of_rows(samples, numbers)
    if isinstance(samples[0], Pair):
        return _batch_of_pairs(samples, numbers)
    text = np.stack([_checked(text, number, cfg.seq_length) for text, number in zip(samples, numbers, strict=True)])
    tokens = text[:, :-1]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    loss_mask, documents = np.ones(tokens.shape, dtype=np.float32), None
    if cfg.eod_mask_loss or cfg.reset_position_ids or cfg.reset_attention_mask:
        ends = _ends(tokens, cfg, eod)
        if cfg.eod_mask_loss:
            loss_mask[ends] = 0.0
        if cfg.reset_position_ids:
            positions = positions - document_starts(ends)
        if cfg.reset_attention_mask:
            documents = np.cumsum(ends, axis=1) - ends  # ends before this slot: an end belongs to its document
    return Batch(
        tokens=torch.tensor(tokens),
        labels=torch.tensor(text[:, 1:]),
        loss_mask=torch.tensor(loss_mask),
        positions=torch.tensor(positions),
        sample_ids=torch.tensor(list(numbers), dtype=torch.int64),
        doc_ids=None if documents is None else torch.tensor(documents.astype(np.int64)),
    )


def _batch_of_rows(rows: Sequence[Row], numbers: range) -> Batch:
    """Rows that say everything themselves: packed documents, or masked words."""
    documents = [row.documents for row in rows if row.documents is not None]
    return Batch(
        tokens=torch.tensor(np.stack([row.tokens for row in rows])),
        labels=torch.tensor(np.stack([row.labels for row in rows])),
        loss_mask=torch.tensor(np.stack([row.loss for row in rows])),
        positions=torch.tensor(np.stack([row.positions for row in rows])),
        sample_ids=torch.tensor(list(numbers), dtype=torch.int64),
        doc_ids=torch.tensor(np.stack(documents)) if documents else None,
    )


def _batch_of_pairs(pairs: Sequence[Pair], numbers: range) -> Batch:
    """What an encoder and a decoder read."""
    tokens = np.stack([pair.tokens for pair in pairs])
    return Batch(
        tokens=torch.tensor(tokens),
        labels=torch.tensor(np.stack([pair.labels for pair in pairs])),
        loss_mask=torch.tensor(np.stack([pair.loss for pair in pairs])),
        positions=torch.tensor(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)),
        sample_ids=torch.tensor(list(numbers), dtype=torch.int64),
        source=torch.tensor(np.stack([pair.source for pair in pairs])),
        source_lengths=torch.tensor([pair.length for pair in pairs], dtype=torch.int64),
    )


def _checked(text: Tokens, number: int, seq_length: int) -> Tokens:
    if len(text) != seq_length + 1:
        raise ValueError(f"sample {number} has {len(text)} tokens, seq_length {seq_length} needs {seq_length + 1}")
    return text


def _ends(tokens: Tokens, cfg: DataConfig, eod: int | None) -> Bools:
    """Where a document ends, [B, S]; refused when the tokenizer has no such id."""
    if eod is None:
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        asked = " ".join(f"--{name.replace('_', '-')}" for name in names if getattr(cfg, name))
        raise refuse(asked, "the tokenizer has no end-of-document id", "a tokenizer with one, or without these options")
    return tokens == eod


def _check_batch(global_batch: int, micro_batch: int, dp: int) -> None:
    width = micro_batch * dp
    if width < 1 or global_batch < 1 or global_batch % width:
        width = max(width, 1)
        raise refuse(
            f"--global-batch-size {global_batch} --micro-batch-size {micro_batch} --dp {dp}",
            f"the global batch must be a positive multiple of micro batch x dp = {micro_batch * dp}",
            f"--global-batch-size {max(1, -(-global_batch // width)) * width}",
        )


class Prefetcher(Generic[T]):
    """Draws items from `source` in a background thread, `depth` ahead of the consumer.

    An exception of the source is raised where its item would have been; `close` (or leaving the context) stops the
    thread and waits for it. waited: seconds that the consumer stood still for the last item. A thread, not a process:
    signals are the main thread's, and it ends with the process, however that ends.
    """

    waited = 0.0

    def __init__(self, source: Iterator[T], depth: int = 2) -> None:
        self._items: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, source: Iterator[T]) -> None:
        try:
            for item in source:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # handed over whole: the consumer raises it
            self._put(("error", error))

    def _put(self, entry: tuple[str, object]) -> bool:
        """Wait for room; False once the consumer is gone."""
        while not self._stop.is_set():
            try:
                self._items.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        began = time.perf_counter()
        kind, value = self._items.get()
        self.waited = time.perf_counter() - began
        if kind == "item":
            return value  # type: ignore[return-value]
        self._over = True
        if isinstance(value, BaseException):
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and drop what it had ready; safe to call twice."""
        self._over = True
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
