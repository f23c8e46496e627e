"""A checkpoint does not know context parallelism: saved on 2 ranks, resumed on 1, on 4 and with a new deal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotron.core.parallel.pipeline.actions import Kind
from isotron.core.parallel.pipeline.events import LANES, read_events
from isotron.core.parallel.plan import Layout
from isotron.train.timeline import together
from tests.ranks import runs

LAYOUTS: dict[str, dict[str, Any]] = {
    "4, over heads": {"cp": 4, "cp_comm_type": ("a2a",)},
    "dealt anew": {"cp": 1, "dp": 2, "hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8, "trace": 1},
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
        if "trace" in leaves:
            file = Path(there) / "trace" / "step_00000003.json"
            predicted, measured = computed_of(json.loads(file.read_text(encoding="utf-8")))
            assert predicted == measured and {rank for rank, _ in measured} == {0, 1}


def computed_of(trace: dict[str, Any]) -> list[set[tuple[int, str]]]:
    """(rank, action) of what a trace predicts and of what it has measured."""
    return [{(e.rank, e.name) for e in read_events(trace, lane, (Kind.F, Kind.B))} for lane in (LANES[0], LANES[2])]


def test_a_trace_predicts_each_pipeline_with_its_own_number_of_microbatches() -> None:
    everyone: list[dict[str, Any]] = [{"host": "here", "origin": 0.0, "pp": 0, "microbatches": n} for n in (1, 3, 0)]
    for each in everyone:
        each["events"] = [
            [LANES[2], f"{kind}0.{i}", 2.0 * i + at, 2.0 * i + at + 1, {"stage": 0, "microbatch": i}]
            for i in range(each["microbatches"])
            for at, kind in enumerate("FB")
        ]
    trace = together(everyone, Layout(dp=3).table, 7)
    predicted, measured = computed_of(trace)
    assert predicted == measured and len(measured) == 2 + 6
    assert trace["otherData"]["predicted_s"] == 6.0 == trace["otherData"]["measured_s"]
