"""A checkpoint does not know context parallelism: saved on 2 ranks, resumed on 1, on 4 and with a new deal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import runs

LAYOUTS: dict[str, dict[str, Any]] = {
    "4, over heads": {"cp": 4, "cp_comm_type": ("a2a",)},
    "dealt anew": {"cp": 1, "dp": 2, "hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8},
    "1": {"cp": 1, "cpu_offloading": True, "mlp_chunks": 2},
}


def test_the_same_numbers_go_on(ranks: Any, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    cfg = runs.config("llama", dtype="float64", data_path=(runs.write_data(tmp_path),), cp=2, train_iters=4, save=home,
                      save_interval=2)  # fmt: skip
    assert ranks(2, runs.train, cfg, home) == [0] * 2
    before = runs.lines(home)
    for name, leaves in LAYOUTS.items():
        there = str(tmp_path / name)
        resumed = runs.changed(cfg, **leaves, load=runs.step_dir(home, 2), save=there, save_interval=0)
        size = resumed.layout.world
        assert ranks(size, runs.train, resumed, there) == [0] * size
        after = runs.lines(there)
        assert sorted(after) == [3, 4]
        assert after == {step: pytest.approx(before[step], rel=1e-9) for step in after}, name
