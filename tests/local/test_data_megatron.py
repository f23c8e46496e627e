"""Against the published megatron-core package: the same files and the same indexes. Skipped where it is absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isotron.data.indexed import bin_path, idx_path
from isotron.data.indexed_writer import IndexedWriter

pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core is not installed: nothing to compare")


def test_files_are_equal_byte_for_byte(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [[1, 2, 3], [4], [5, 99]]
    builder = IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=np.uint16)
    for ids in documents:
        builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(str(tmp_path / "t.idx"))
    with IndexedWriter(tmp_path / "a", 100) as writer:
        for ids in documents:
            writer.add_document(ids)
    for path in (bin_path, idx_path):
        assert path(tmp_path / "a").read_bytes() == path(tmp_path / "t").read_bytes()
