"""Rows of Parquet and Arrow files, a block at a time, only the columns that are asked for. PURE.

Needs `pyarrow` (pip install pyarrow). Arrow files are what the `datasets` library saves: record batches in stream or
file form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotron.core.errors import Refused, refuse
from isotron.tokenizers.base import need_library

ROWS = 1024  # that are turned into Python values together


def rows(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The rows in order as {column: value}; columns that the file lacks are left out, no `columns` means all."""
    arrow = need_library("pyarrow", f"--input {path}")
    batches = _parquet(path, columns) if path.suffix == ".parquet" else _arrow(path, columns, arrow)
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                yield from batch.slice(start, ROWS).to_pylist()
    except (arrow.ArrowInvalid, arrow.ArrowException, OSError) as error:
        raise damaged_table(path, error) from error


def column_names(path: Path) -> list[str]:
    """The columns of a file."""
    arrow = need_library("pyarrow", f"--input {path}")
    try:
        if path.suffix == ".parquet":
            return list(need_library("pyarrow.parquet", f"--input {path}").read_schema(path).names)
        with arrow.memory_map(str(path)) as source:
            return list(_reader(source, need_library("pyarrow.ipc", f"--input {path}"), arrow).schema.names)
    except (arrow.ArrowInvalid, arrow.ArrowException, OSError) as error:
        raise damaged_table(path, error) from error


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    library = need_library("pyarrow.parquet", f"--input {path}")
    with library.ParquetFile(path) as file:
        wanted = [name for name in file.schema_arrow.names if not columns or name in columns]
        yield from file.iter_batches(batch_size=ROWS, columns=wanted or None, use_threads=False)


def _arrow(path: Path, columns: Sequence[str], arrow: Any) -> Iterator[Any]:
    ipc = need_library("pyarrow.ipc", f"--input {path}")
    with arrow.memory_map(str(path)) as source:
        reader = _reader(source, ipc, arrow)
        wanted = [name for name in reader.schema.names if not columns or name in columns]
        is_file = isinstance(reader, ipc.RecordBatchFileReader)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.select(wanted) if wanted else batch


def _reader(source: Any, ipc: Any, arrow: Any) -> Any:
    """The stream form, which `datasets` writes, or the file form."""
    try:
        return ipc.open_stream(source)
    except arrow.ArrowInvalid:
        source.seek(0)
        return ipc.open_file(source)


def damaged_table(path: Path, error: Exception) -> Refused:
    """The refusal of a table that its library cannot read."""
    return refuse(f"--input {path}", f"it is not a readable {path.suffix[1:]} file: {error}", "a complete file")
