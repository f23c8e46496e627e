"""Conversations to token files for fine-tuning: ids in one pair, which of them are answers in a second. PURE.

A record is {"messages": [{"role": .., "content": ..}, ..]}, as JSON lines, one array, Parquet or a `datasets`
directory. The tokenizer's chat template says what text a conversation is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from isotron.core.errors import refuse
from isotron.data.blend import ANSWERS
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.info import write_info
from isotron.data.inputs import expand
from isotron.data.parse import Unusable, read_values, refuse_bad
from isotron.data.records import Record, read_batches
from isotron.tokenizers.base import Tokenizer
from isotron.tokenizers.chat import ChatTemplate

KEY = "messages"


def is_chat(path: Path) -> bool:
    """Whether the first record of a file is a conversation."""
    for batch in read_batches([path], max_records=1):
        try:
            values = read_values(batch.records[0])
        except Unusable:  # whoever reads the file says what is wrong with it
            return False
        return isinstance(values, Mapping) and KEY in values
    return False


def preprocess_chat(
    inputs: Sequence[str | Path],
    prefix: str | Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    log: Callable[[str], None] = print,
) -> int:
    """Write `prefix` and `prefix`.answers; the number of conversations. Refused: one without any answer to learn."""
    ids_of, answers_of, count = 0, 0, 0
    with ExitStack() as stack:
        ids = stack.enter_context(IndexedWriter(prefix, tokenizer.vocab_size))
        answers = stack.enter_context(IndexedWriter(f"{prefix}{ANSWERS}", dtype=np.uint8))
        for path, record in _records(inputs):
            made = template.encode(_messages(path, record), tokenizer)
            if not made.answers.any():
                raise refuse_bad(
                    path, record, Unusable("the conversation has no answer (role assistant)", record.offset)
                )
            ids.add_document(made.ids)
            answers.add_document(made.answers.astype(np.uint8))
            ids_of, answers_of, count = ids_of + len(made.ids), answers_of + int(made.answers.sum()), count + 1
        if count == 0:
            case = "there is no conversation in the input"
            raise refuse(f"--input {', '.join(map(str, inputs))}", case, 'lines of {"messages": [..]}', exit_code=1)
    note = {"format": 1, "tokenizer": tokenizer.describe(), "append_eod": False, "documents": count, "tokens": ids_of}
    write_info(prefix, note)
    log(f"{count:,} conversations, {ids_of:,} tokens, {answers_of:,} of them in answers -> {prefix}.bin/.idx")
    return count


def _records(inputs: Sequence[str | Path]) -> Iterator[tuple[str, Record]]:
    for batch in read_batches(expand(inputs), columns=(KEY,)):
        for record in batch.records:
            yield batch.path, record


def _messages(path: str, record: Record) -> list[Mapping[str, Any]]:
    """The messages of one record, refused with its place where it is no conversation."""
    try:
        values = read_values(record)
        found = values.get(KEY) if isinstance(values, Mapping) else None
        if not isinstance(found, list) or not found:
            raise Unusable(f"the record has no list {KEY!r}", record.offset)
        for message in found:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise Unusable('a message is {"role": TEXT, "content": TEXT}', record.offset)
        return found
    except Unusable as error:
        raise refuse_bad(path, record, error) from error
