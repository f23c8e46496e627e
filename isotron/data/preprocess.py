"""`isotron preprocess`: text in, indexed token files out. PURE.

Batches of raw records go to worker processes and come back in order, at most a few per worker at a time: the output is
the same for any number of workers, and memory does not grow with the input. A job that was killed goes on where its
last entry in the journal says; an error before the first entry leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from isotron.core.errors import Problem, Refused, refuse
from isotron.data.encode import Encoder
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.inputs import expand
from isotron.data.journal import Counts, Journal
from isotron.data.parse import Bad
from isotron.data.partitions import finish, part_prefix
from isotron.data.records import WHOLE, RecordBatch, Share, read_batches
from isotron.data.workers import cores, encode_all
from isotron.progress import Log, Report, progress
from isotron.tokenizers.base import Tokenizer

BYTES_PER_WORKER = 8 << 20  # a worker takes longer to start than to encode less than this
SHOWN = 5  # bad records that are described in full


@dataclass(frozen=True)
class Summary:
    """What preprocessing wrote and left out. `outputs` are the prefixes; documents and tokens count over all of them.

    `empty` texts hold only white space; `bad` records were skipped under on_bad_line="skip"; `truncated` documents were
    cut to a number of tokens. `records` of the input were read.
    """

    outputs: tuple[str, ...]
    documents: int
    tokens: int
    empty: int
    bad: int
    truncated: int
    records: int
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
            f"of {self.records:,} records: {self.documents:,} documents kept, {self.empty} empty texts and {self.bad} "
            f"bad records skipped, {self.truncated} documents truncated; "
            f"{self.seconds:.1f} s, {self.tokens_per_s:,.0f} tokens/s"
        )


@np.errstate(all="raise")  # a number that does not fit ends the job, also as a mere warning
def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int | None = None,
    on_bad_line: str = "error",
    split_sentences: bool = False,
    keep_newlines: bool = False,
    lang: str = "english",
    max_documents: int = 0,
    max_document_tokens: int = 0,
    share: Share = WHOLE,
    log: Log = print,
) -> Summary:
    """Encode every record of `inputs` and write `{output_prefix}_{key}_document.bin/.idx` for each key.

    inputs: paths, patterns or `datasets` directories; see `inputs`. workers: processes; None means the cores of this
    machine, fewer for small inputs. split_sentences: a sequence for each sentence (of the language `lang`), files
    named `_sentence`. max_documents, max_document_tokens: 0 means all. share: one part of the input, written under a
    name of its own for `partitions.join`. Refused: no usable document, a bad record (unless on_bad_line="skip"), bad
    options.
    """
    limits = {"max_documents": max_documents, "max_document_tokens": max_document_tokens}
    _check_options(json_keys, workers, on_bad_line, limits, share)
    paths = expand(inputs)
    cut = (split_sentences, keep_newlines, lang, max_document_tokens)
    encoder = Encoder(tokenizer, tuple(json_keys), append_eod, *cut)
    prefix = str(output_prefix) if share.count == 1 else part_prefix(output_prefix, share)
    level = "sentence" if split_sentences else "document"
    outputs = tuple(f"{prefix}_{key}_{level}" for key in json_keys)
    journal = Journal(prefix, _job(paths, encoder, max_documents, share))
    return _Run(paths, outputs, encoder, journal, share, on_bad_line, max_documents, log).run(workers)


def _job(paths: Sequence[Path], encoder: Encoder, max_documents: int, share: Share) -> dict[str, Any]:
    """What decides the bytes of the outputs, as plain JSON values."""
    stats = [path.stat() for path in paths]
    files = [[str(p.absolute()), s.st_size, s.st_mtime_ns] for p, s in zip(paths, stats, strict=True)]
    options = {k: v for k, v in vars(encoder).items() if k != "tokenizer"}
    limits = {"max_documents": max_documents, "share": asdict(share)}
    return {"files": files, "tokenizer": encoder.tokenizer.describe(), **options, **limits}


@dataclass
class _Run:
    """One job in progress."""

    paths: Sequence[Path]
    outputs: tuple[str, ...]
    encoder: Encoder
    journal: Journal
    share: Share
    on_bad_line: str
    max_documents: int
    log: Log

    def run(self, workers: int | None) -> Summary:
        started = time.monotonic()
        size = sum(path.stat().st_size for path in self.paths) // self.share.count
        replaced = [output for output in self.outputs if Path(f"{output}.idx").exists()]
        with ExitStack() as stack:
            vocab = self.encoder.tokenizer.vocab_size
            writers = []
            for output in self.outputs:
                writers.append(IndexedWriter(output, vocab, resumable=True))
                stack.callback(self._let_go, writers[-1])
            after, counts = self.journal.begin(writers)
            if after != (0, 0):
                self.log(f"going on behind {counts.records:,} records that an earlier run of this command has done")
            report = stack.enter_context(progress("preprocess", size, self.log))
            batches = read_batches(self.paths, columns=self.encoder.keys, share=self.share, after=after)
            self._encode(self._limited(batches, counts.records), workers or _workers(size), writers, counts, report)
            self._finish(writers, counts)
            self.journal.remove()
        if replaced:
            self.log(f"already there, replaced: {', '.join(f'{output}.bin/.idx' for output in replaced)}")
        documents, tokens = sum(w.documents for w in writers), sum(w.tokens for w in writers)
        left_out = {"empty": counts.empty, "bad": counts.bad, "truncated": counts.truncated, "records": counts.records}
        seconds = time.monotonic() - started
        return Summary(self.outputs, documents, tokens, **left_out, seconds=seconds, dtype=writers[0].dtype.name)

    def _encode(
        self,
        batches: Iterator[RecordBatch],
        workers: int,
        writers: Sequence[IndexedWriter],
        counts: Counts,
        report: Report,
    ) -> None:
        for encoded in encode_all(self.encoder, batches, workers):
            usable = any(w.documents for w in writers) or any(len(c.sequences) for c in encoded.columns)
            _take_bad(encoded.bad, self.on_bad_line, counts.bad, self.log, usable)
            counts.add(encoded.empty, encoded.truncated, len(encoded.bad), encoded.records)
            for writer, column in zip(writers, encoded.columns, strict=True):
                writer.add_documents(*column)
            file, number, position = encoded.place
            report(position, documents=sum(w.documents for w in writers), tokens=sum(w.tokens for w in writers))
            if self.journal.due():
                self.journal.write((file, number), writers, counts)

    def _limited(self, batches: Iterable[RecordBatch], done: int) -> Iterator[RecordBatch]:
        """The batches up to `max_documents` records, of which `done` are behind us."""
        for batch in batches:
            if self.max_documents and done + len(batch.records) >= self.max_documents:
                yield replace(batch, records=batch.records[: self.max_documents - done])
                return
            done += len(batch.records)
            yield batch

    def _let_go(self, writer: IndexedWriter) -> None:
        """Keep what an entry of the journal stands for; without one remove what was begun."""
        if self.journal.exists:
            writer.release()
        else:
            writer.abort()

    def _finish(self, writers: Sequence[IndexedWriter], counts: Counts) -> None:
        """Give the outputs their names; some output without a document is a failure, of a part it is noted."""
        for writer in writers:
            if writer.documents == 0 and self.share.count == 1:
                self.journal.remove()
                raise refuse(
                    f"--input {', '.join(map(str, self.paths[:3]))}{' ...' if len(self.paths) > 3 else ''}",
                    f"no document for {writer.prefix}: {counts.empty} empty texts, {counts.bad} bad records; "
                    "nothing was written",
                    "input with one JSON object per line whose --json-keys hold text",
                    exit_code=1,
                )
        for writer in writers:
            finish(writer, self.encoder.tokenizer.describe(), self.encoder.append_eod)


def _check_options(
    json_keys: Sequence[str], workers: int | None, on_bad_line: str, limits: dict[str, int], share: Share
) -> None:
    """Refuse what no input could make right, all of it at once."""
    problems = []
    if not json_keys or len(set(json_keys)) != len(json_keys):
        asked = f"--json-keys {' '.join(json_keys)}"
        problems.append(Problem(asked, "at least one key is needed, and each only once", "--json-keys text"))
    if workers is not None and workers < 1:
        problems.append(Problem(f"--workers {workers}", "at least one process is needed", "--workers 1"))
    if on_bad_line not in ("error", "skip"):
        problems.append(Problem(f"--on-bad-line {on_bad_line}", "known are error and skip", "--on-bad-line skip"))
    for name, value in limits.items():
        if value < 0:
            flag = "--" + name.replace("_", "-")
            problems.append(Problem(f"{flag} {value}", "it is a number above 0, or 0 for all", f"{flag} 0"))
    if not 0 <= share.index < share.count:
        asked = f"--partitions {share.count} --partition {share.index}"
        case = f"partitions are numbered 0 to {max(share.count, 1) - 1}"
        problems.append(Problem(asked, case, f"--partitions {max(share.count, 1)} --partition 0"))
    if share.count > 1 and limits["max_documents"]:
        asked = f"--partitions {share.count} --max-documents {limits['max_documents']}"
        case = "which documents are the first is not known to a part"
        problems.append(Problem(asked, case, "--max-documents 0, or --partitions 1"))
    if problems:
        raise Refused(problems)


def _workers(size: int) -> int:
    """Processes for `size` bytes of input: the cores this process may use, fewer when there is little to do."""
    return max(1, min(cores(), size // BYTES_PER_WORKER))


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
