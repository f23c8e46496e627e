"""`isotron preprocess`: text in, indexed token files out. PURE.

Batches of raw records go to worker processes and come back in order, at most a few per worker at a time: the output is
the same for any number of workers, and memory does not grow with the input. Nothing is left behind after an error.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from isotron.core.errors import Problem, Refused, refuse
from isotron.data.encode import Bad, Encoded, Encoder
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.info import write_info
from isotron.data.progress import Log, progress
from isotron.data.records import RecordBatch, expand, read_batches
from isotron.tokenizers.base import Tokenizer

BYTES_PER_WORKER = 2 << 20  # a worker takes longer to start than to encode less than this
AHEAD = 3  # batches on the way per worker
SHOWN = 5  # bad records that are described in full


@dataclass(frozen=True)
class Summary:
    """What preprocessing wrote and left out. `outputs` are the prefixes; documents and tokens count over all of them.

    `empty` texts hold only white space; `bad` records were skipped under on_bad_line="skip".
    """

    outputs: tuple[str, ...]
    documents: int
    tokens: int
    empty: int
    bad: int
    seconds: float
    dtype: str

    @property
    def tokens_per_s(self) -> float:
        """Tokens written per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        """Two lines for the console."""
        files = ", ".join(f"{output}.bin/.idx" for output in self.outputs)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.dtype}) -> {files}\n"
            f"left out: {self.empty} empty texts, {self.bad} bad records; "
            f"{self.seconds:.1f} s, {self.tokens_per_s:,.0f} tokens/s"
        )


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int | None = None,
    on_bad_line: str = "error",
    log: Log = print,
) -> Summary:
    """Encode every record of `inputs` and write `{output_prefix}_{key}_document.bin/.idx` for each key.

    inputs: paths or patterns of .jsonl/.json/.ndjson files, also .gz. workers: processes; None means the cores of this
    machine, fewer for small inputs. Refused: no usable document, a bad record (unless on_bad_line="skip"), bad options.
    """
    _check_options(json_keys, workers, on_bad_line)
    paths = expand(inputs)
    size = sum(path.stat().st_size for path in paths)
    encoder = Encoder(tokenizer, tuple(json_keys), append_eod)
    outputs = tuple(f"{output_prefix}_{key}_document" for key in json_keys)
    replaced = [output for output in outputs if Path(f"{output}.idx").exists()]
    started = time.monotonic()
    empty = bad = 0
    with ExitStack() as stack:
        writers = [IndexedWriter(output, tokenizer.vocab_size) for output in outputs]
        for writer in writers:
            stack.callback(writer.abort)  # after an error; after `close` there is nothing left to remove
        report = stack.enter_context(progress(size, log))
        for encoded in _encode_all(encoder, read_batches(paths), workers or _workers(size)):
            usable = any(w.documents for w in writers) or any(len(lengths) for _, lengths in encoded.columns)
            _take_bad(encoded.bad, on_bad_line, bad, log, usable)
            empty, bad = empty + encoded.empty, bad + len(encoded.bad)
            for writer, (ids, lengths) in zip(writers, encoded.columns, strict=True):
                writer.add_documents(ids, lengths)
            report(encoded.position, sum(w.documents for w in writers), sum(w.tokens for w in writers))
        _check_filled(writers, paths, empty, bad)
        _close(writers, tokenizer, append_eod)
    if replaced:
        log(f"already there, replaced: {', '.join(f'{output}.bin/.idx' for output in replaced)}")
    documents, tokens = sum(w.documents for w in writers), sum(w.tokens for w in writers)
    return Summary(outputs, documents, tokens, empty, bad, time.monotonic() - started, writers[0].dtype.name)


def _check_options(json_keys: Sequence[str], workers: int | None, on_bad_line: str) -> None:
    """Refuse what no input could make right, all of it at once."""
    problems = []
    if not json_keys or len(set(json_keys)) != len(json_keys):
        asked = f"--json-keys {' '.join(json_keys)}"
        problems.append(Problem(asked, "at least one key is needed, and each only once", "--json-keys text"))
    if workers is not None and workers < 1:
        problems.append(Problem(f"--workers {workers}", "at least one process is needed", "--workers 1"))
    if on_bad_line not in ("error", "skip"):
        problems.append(Problem(f"--on-bad-line {on_bad_line}", "known are error and skip", "--on-bad-line skip"))
    if problems:
        raise Refused(problems)


def _workers(size: int) -> int:
    """Processes for `size` bytes of input: the cores this process may use, fewer when there is little to do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, size // BYTES_PER_WORKER))


def _encode_all(encoder: Encoder, batches: Iterable[RecordBatch], workers: int) -> Iterator[Encoded]:
    """The batches encoded, in order; in this process when `workers` is 1."""
    if workers == 1:
        yield from map(encoder, batches)
        return
    # spawn: a forked child would inherit threads and, under a training program, torch
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode, batch))
            if len(pending) >= AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise refuse(
            f"--workers {workers}",
            "a worker process died (out of memory, or killed; or the calling script starts work when it is imported)",
            f"--workers {max(1, workers // 2)}",
            exit_code=1,
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_HELD: list[Encoder] = []  # the encoder of a worker process, given to it once


def _start_worker(encoder: Encoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _HELD[:] = [encoder]


def _encode(batch: RecordBatch) -> Encoded:
    return _HELD[0](batch)


def _take_bad(bad: Sequence[Bad], on_bad_line: str, before: int, log: Log, usable: bool) -> None:
    """Stop at the first bad record, or say what is skipped (the first few in full). `usable`: some record was not."""
    for number, record in enumerate(bad, start=before):
        if on_bad_line == "error":
            if record.keys and not usable:  # it is not this record that is wrong, it is the key
                raise refuse(f"--input {record.where}", record.why, f"--json-keys {record.keys[0]}")
            fix = "correct this record, or --on-bad-line skip"
            raise refuse(f"--input {record.where}", record.why, fix, exit_code=1)
        if number < SHOWN:
            log(f"skipped {record.where}: {record.why}")
        elif number == SHOWN:
            log("more bad records are skipped without a line each; the summary counts them")


def _check_filled(writers: Sequence[IndexedWriter], paths: Sequence[Path], empty: int, bad: int) -> None:
    """Refuse before anything gets its name when some output would hold no document."""
    for writer in writers:
        if writer.documents == 0:
            raise refuse(
                f"--input {', '.join(map(str, paths[:3]))}{' ...' if len(paths) > 3 else ''}",
                f"no document for {writer.prefix}: {empty} empty texts, {bad} bad records; nothing was written",
                "input with one JSON object per line whose --json-keys hold text",
                exit_code=1,
            )


def _close(writers: Sequence[IndexedWriter], tokenizer: Tokenizer, append_eod: bool) -> None:
    for writer in writers:
        writer.close()
        note = {"format": 1, "tokenizer": tokenizer.describe(), "append_eod": append_eod}
        write_info(writer.prefix, note | {"documents": writer.documents, "tokens": writer.tokens})
