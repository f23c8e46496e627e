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
    """Dropout, blends, validation and the checkpoint: all of them at once, against one process."""
    words = runs.write_data(tmp_path)
    whole = str(tmp_path / "whole")
    cfg = runs.config("bert", data_path=("0.7", words, "0.3", words), save=whole, save_interval=2, **BERT)
    assert ranks(1, runs.train, cfg, whole) == [0]
    wanted = {key: runs.lines(whole, key) for key in ("loss", "grad_norm", "sample_ids", "eval_loss")}
    assert set(wanted["loss"]) == {1, 2, 3, 4} and set(wanted["eval_loss"]) == {2, 4}
    for name, layout in LAYOUTS.items():
        rest = str(tmp_path / name.replace(" ", "-"))
        other = runs.changed(cfg, load=runs.step_dir(whole, 2), save=rest, layer_split="balanced", **layout)
        world = other.layout.world
        assert ranks(world, runs.train, other, rest) == [0] * world
        for key, first in wanted.items():
            later = runs.lines(rest, key)
            assert later == {step: pytest.approx(first[step], rel=1e-9) for step in first if step > 2}, (name, key)
        found, own = runs.tensors(runs.step_dir(rest, 4)), runs.tensors(runs.step_dir(whole, 4))
        assert found.keys() == own.keys()
        assert all((found[n] - own[n]).abs().max() <= 1e-9 * own[n].abs().max() + 1e-15 for n in own), name
