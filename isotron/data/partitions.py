"""Preprocessing on many machines: each writes one part of the input by its number, and the parts are joined. PURE.

Part i of n is what begins in the i-th n-th of the bytes of all inputs (see `records.Share`), so the parts in order are
the input in order, and joined they are byte for byte what one machine would have written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse
from isotron.data.indexed import bin_path, idx_path
from isotron.data.indexed_writer import IndexedWriter, merge
from isotron.data.info import read_info, write_info
from isotron.data.records import Share


def part_prefix(prefix: str | Path, share: Share) -> str:
    """Under which prefix a part is written."""
    return f"{prefix}_part-{share.index:05d}-of-{share.count:05d}"


def finish(writer: IndexedWriter, tokenizer: Mapping[str, Any], append_eod: bool) -> None:
    """Close a pair of files and write the note beside it; a part in which no document begins is the note alone.

    `tokenizer` as it describes itself.
    """
    note = {"format": 1, "tokenizer": tokenizer, "append_eod": append_eod}
    note |= {"documents": writer.documents, "tokens": writer.tokens}
    if writer.documents:
        writer.close()
    else:
        writer.abort()
        for path in (bin_path, idx_path):
            path(writer.prefix).unlink(missing_ok=True)
    write_info(writer.prefix, note)


def join(prefix: str | Path, count: int, names: Sequence[str]) -> list[str]:
    """Join the parts of `prefix` into `{prefix}_{name}` for each name (`text_document`); the prefixes written.

    Refused: a part that is not there (its number is named), or none with a document.
    """
    outputs = []
    for name in names:
        parts = [f"{part_prefix(prefix, Share(index, count))}_{name}" for index in range(count)]
        missing = [index for index, part in enumerate(parts) if not _is_done(part)]
        if missing:
            listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
            raise refuse(
                f"--merge-partitions --partitions {count} --output-prefix {prefix}",
                f"{len(missing)} of {count} parts of {name} are not there: {listed}",
                f"isotron preprocess with --partitions {count} --partition {missing[0]} and the same other options",
            )
        filled = [part for part in parts if idx_path(part).is_file()]
        if not filled:
            raise refuse(
                f"--merge-partitions --partitions {count} --output-prefix {prefix}",
                f"none of the parts of {name} holds a document; nothing was written",
                "input with one JSON object per line whose --json-keys hold text",
                exit_code=1,
            )
        merge(filled, f"{prefix}_{name}")
        outputs.append(f"{prefix}_{name}")
    return outputs


def _is_done(part: str) -> bool:
    if idx_path(part).is_file() and bin_path(part).is_file():
        return True
    note = read_info(part)
    return note is not None and note.get("documents") == 0
