"""Searched tables, tables in files, and weight gradients placed under a limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.errors import Refused
from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.parallel.costs import costed
from isotron.core.parallel.pipeline import registry, tables
from isotron.core.parallel.pipeline.library import costs_of, forward_only, plan
from isotron.core.parallel.pipeline.passes import with_communication
from isotron.core.parallel.pipeline.search import search, stage_costs
from isotron.core.parallel.pipeline.simulate import Costs, simulate
from isotron.core.parallel.pipeline.weights import place_weights
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.split import model_costs

UNEVEN = Costs(10, 25, 11, 2)


@pytest.mark.parametrize("costs", [Costs(), UNEVEN, Costs(4, 6, 1), Costs(1, 4, 3, 0.5)])
@pytest.mark.parametrize("memory", [1.5, 2, 4, 7])
def test_never_worse_than_the_best_hand_written(costs: Costs, memory: float) -> None:
    p, m = 4, 6
    found = search(p, m, costs, memory)
    assert max(found.report.peak) <= memory
    for name, entry in registry.SCHEDULES.items():
        for v in {"one": (1,), "two": (2,), "several": (2, 3)}[entry.per_rank]:
            report = simulate(plan(name, p, m, v), stage_costs(costs, v))
            if max(report.peak) <= memory:
                assert found.report.makespan <= report.makespan, (name, v)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.sampled_from([1, 2]), st.integers(1, 6), st.integers(0, 3), st.data())
def test_costs_of_every_stage(p: int, v: int, m: int, way: int, data: st.DataObject) -> None:
    """Stages of any cost and size: never worse than the best hand-written one that keeps no more."""
    stages = p * v
    numbers = st.lists(st.integers(0, 9), min_size=5 * stages, max_size=5 * stages).filter(lambda n: any(n[::5]))
    costs = costs_of(tuple(data.draw(numbers)), p, v)
    assert sum(costs.per_stage("activation", stages)) == pytest.approx(p)
    found = search(p, m, replace(costs, transfer=way), memory := data.draw(st.sampled_from([p, p + 1.5, 2.0 * p])))
    assert found.table.stages == stages and max(found.report.peak) <= memory * (1 + 1e-9)
    for name, entry in registry.SCHEDULES.items():
        if v == 1 if entry.per_rank == "one" else v == 2:
            for group in (0, p // 2) if name == "interleaved" and m > p else (0,):
                report = simulate(plan(name, p, m, v, group), replace(costs, transfer=way))
                if max(report.peak) <= memory:
                    assert found.report.makespan <= report.makespan, (name, group)


def test_the_models_own_costs() -> None:
    """A mixed model over an uneven split: what each stage computes, the output layer in the last forward."""
    model = DeepseekV3Config(
        4, 32, 4, 0, 0, 48, 131, 16, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, kv_lora_rank=16,
        moe_layer_freq="[0,1,1,1]", qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, mtp_num_layers=1,
    )  # fmt: skip
    costs = model_costs(model)
    experts = model.visited("layers.*.moe.experts.up.weight")
    assert experts < 1 and costs.blocks[1] == costs.blocks[3] != costs.blocks[0]
    assert costs.head == 2 * 131 * 32 and costs.last > costs.head + costs.blocks[3]
    layout = Layout(pp=2, dp=1, schedule="auto", schedule_memory=3.0, layers_per_stage=(3, 1))
    filled = costed(model, layout)
    rows = [filled.schedule_costs[i : i + 5] for i in (0, 5)]
    assert [row[4] for row in rows] == [3, 1] and rows[0][0] == pytest.approx(rows[0][2], rel=0.5)
    assert max(sum(row[:3]) for row in rows) == pytest.approx(1000, abs=2)
    assert costed(model, filled) == filled and costed(model, replace(layout, schedule="1f1b")).schedule_costs == ()
    again = costed(model, replace(layout, recompute="full")).schedule_costs
    assert again[1] / again[2] > rows[0][1] / rows[0][2]
    own = costs_of(filled.schedule_costs, 2, 1)
    assert simulate(filled.table(6), own).makespan <= simulate(plan("1f1b", 2, 6), own).makespan


def test_more_memory_is_never_longer_and_a_little_is_enough() -> None:
    times = [search(4, 8, UNEVEN, memory).report.makespan for memory in (1.5, 2, 3, 4, 7)]
    assert times == sorted(times, reverse=True)
    with pytest.raises(Refused, match=r"--schedule auto --schedule-memory 0.2(.|\n)*keeps that little"):
        search(4, 8, UNEVEN, 0.2)


def test_a_searched_plan_keeps_its_placement() -> None:
    for m in (1, 3, 8):
        assert plan("auto", 2, m, 2, memory=2.0, costs=(10, 14, 11)).placement == (0, 1, 1, 0)
        assert plan("auto", 3, m, 1, memory=3.0).placement == (0, 1, 2)
    assert plan("auto", 2, 4).name == "1f1b" and plan("auto", 2, 4, 2).name == "interleaved"


def test_costs_from_numbers() -> None:
    assert costs_of(()) == Costs() and costs_of((10, 14, 11, 2)) == Costs(10, 25, 11, 2)
    both = (1, 2, 3, 4, 1, 5, 6, 7, 8, 3)
    assert costs_of(both, 2) == Costs((1, 5), (5, 13), (3, 7), (4, 8), (0.5, 1.5))
    assert costs_of((1, 2, 3, 4, 5, 6, 7, 8), 2, 1) == Costs((1, 5), (5, 13), (3, 7), (4, 8), (1, 1))
    for numbers in ((1, 2), (1, 2, -1), (0, 0, 0), both):
        with pytest.raises(Refused, match="input gradient, weight gradient"):
            costs_of(numbers, 3)


def test_weight_gradients_under_a_limit() -> None:
    bare = registry.build("1f1b", 4, 8)
    for limit in (4, 5, 7):
        report = simulate(with_communication(place_weights(bare, limit)))
        assert max(report.peak) <= limit and report.makespan <= simulate(plan("zb-h1", 4, 8)).makespan
    with pytest.raises(Refused, match="with at most 2 activations"):
        place_weights(bare, 2)


def test_csv_reads_back(tmp_path: Path) -> None:
    for name in ("1f1b", "zbv", "dualpipev"):
        table = plan(name, 3, 6)
        read = tables.from_csv(tables.to_csv(table), name)
        assert read == table


def test_foreign_csv() -> None:
    table = tables.parse("0F0,0F1,,0I0,0W0,0B1\n,1F0,1B0,1F1,1B1\n", "mine")
    assert [str(a) for a in table.ranks[0]] == ["F0.0", "F0.1", "B0.0", "W0.0", "B0.1"]
    assert (table.placement, table.microbatches) == ((0, 1), 2)
    assert simulate(with_communication(table)).peak == (2, 1)


def test_a_table_from_a_file_is_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(tables.to_csv(registry.build("zbv", 2, 5)), encoding="utf-8")
    assert plan(str(file), 2, 5, 2).ranks == plan("zbv", 2, 5).ranks
    assert registry.placement(str(file), 2, 2) == (0, 1, 1, 0)
    assert forward_only(str(file), 2, 3, 2).microbatches == 3
    simulate(plan(str(file), 2, 5, 2))
    with pytest.raises(Refused, match=r"with 4 microbatches(.|\n)*2 ranks, 5 microbatches and 4 stages(.|\n)*--vpp 2"):
        plan(str(file), 2, 4, 2)


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0.0,B0.0\nF0.1,B0.1\n", "stage 0 is on rank 0 already"),
        ("F0.0,B0.0\nF2.0,B2.0\n", r"its stages are \[0, 2\]"),
        ("F0.0,what\n", "'what'"),
        ("", "its stages are"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        tables.parse(text)


def test_a_missing_file() -> None:
    with pytest.raises(Refused, match="it cannot be read"):
        plan("nowhere/table.csv", 2, 4)
