"""Whether a part of a split (training, validation) holds at least one sample, and which split would. PURE."""

from __future__ import annotations

import numpy as np

from isotron.core.errors import refuse
from isotron.data.config import DataConfig
from isotron.data.gpt_dataset import split_documents
from isotron.data.indexed import IndexedDataset

NAMES = ("training", "validation", "test")
_HELD_OUT = (1, 2, 5, 10, 20, 30, 50)  # percent for validation that are tried, in this order


def check_part(config: DataConfig, data: IndexedDataset, documents: range, part: int, needed: int) -> None:
    """Refuse a part (0 training, 1 validation) whose documents hold less than one sample, of `needed` tokens; the
    message has a way out.
    """
    tokens = _tokens(data, documents)
    if tokens >= needed:
        return
    apart = bool(config.valid_data_path)
    option = "--valid-data-path" if apart and part else "--data-path"
    split = "" if apart else f" --split {config.split}"
    raise refuse(
        f"{option} {data.prefix}{split} --seq-length {config.seq_length}",
        f"the {NAMES[part]} part has {len(documents)} of its {len(data)} documents, which hold {tokens} tokens; "
        f"one sample takes {needed}",
        _way_out(config, data, part, needed),
    )


def _tokens(data: IndexedDataset, documents: range) -> int:
    return int(np.sum(data.lengths[documents.start : documents.stop], dtype=np.int64))


def _way_out(config: DataConfig, data: IndexedDataset, part: int, needed: int) -> str:
    """What makes the part long enough, the surest first."""
    apart = bool(config.valid_data_path)
    ways = [] if apart else [f"--split {split}" for split in _splits(data, needed, with_validation=part == 1)]
    ways += ["--eval-iters 0"] if part else []
    all_tokens = _tokens(data, range(len(data)))
    if not ways and all_tokens > 1:
        ways = [f"--seq-length {max(1, min(0, all_tokens - needed) + config.seq_length)} --split 100,0,0"]
    return ", or ".join([*ways, "more data"])


def _splits(data: IndexedDataset, needed: int, with_validation: bool) -> list[str]:
    """The first split that leaves both parts (or else training alone) at least one sample; none where there is none."""
    tried = [f"{100 - percent},{percent},0" for percent in _HELD_OUT] if with_validation else ["100,0,0"]
    for split in tried:
        parts = split_documents(split, len(data))[: 1 + with_validation]
        if all(_tokens(data, documents) >= needed for documents in parts):
            return [split]
    return []
