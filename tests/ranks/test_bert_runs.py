"""Runs of an encoder on masked words: the same numbers in every layout, also of a run that goes on in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import runs

pytestmark = pytest.mark.usefixtures("one_thread")
LAYOUTS: dict[str, dict[str, Any]] = {
    "CP2xTP2+SP": {"cp": 2, "tp": 2, "sequence_parallel": True, "cp_comm_type": ("p2p", "a2a", "allgather")},
    "PP2x2chunks zero 2": {"pp": 2, "vpp": 2, "dp": 2, "zero": 2, "micro_batch_size": 1, "recompute": "full"},
}
# documents that do not see each other, rows that are cut short, whose padding nobody sees
BERT = {"dtype": "float64", "train_iters": 4, "eval_iters": 2, "eval_interval": 2, "split": "80,20,0", "seq_length": 24,
        "mask_prob": 0.2, "short_seq_prob": 0.4, "mask_token_id": 129, "reset_attention_mask": True}  # fmt: skip


def test_goes_on_in_every_layout(ranks: Any, tmp_path: Path) -> None:
    runs.goes_on(ranks, tmp_path, "bert", BERT, LAYOUTS)
