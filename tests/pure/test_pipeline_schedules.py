"""The schedules beyond 1F1B: every size proved, the published formulas exact where they hold, memory as promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.errors import Refused
from isotron.core.parallel.pipeline import registry, schedules, vshape
from isotron.core.parallel.pipeline.actions import Kind, Schedule
from isotron.core.parallel.pipeline.library import forward_only, placement, plan
from isotron.core.parallel.pipeline.path import critical_path
from isotron.core.parallel.pipeline.simulate import Costs, Report, Travel, simulate

SIZES = (1, 5, 16)
LARGE = (6, 7, 8)  # ranks for which every number of microbatches is behind --slow
PER_RANK = {"one": (1,), "two": (2,), "several": (2, 3)}
SPLIT = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min")


def run(name: str, p: int, m: int, v: int = 1, costs: Costs | None = None) -> Report:
    return simulate(plan(name, p, m, v), costs)


def check_size(name: str, p: int, m: int, v: int) -> None:
    """Every forward and backward once, no deadlock under either kind of communication, few open receives."""
    table = plan(name, p, m, v)
    report = simulate(table)
    where = name, p, m, v
    assert max(report.posted) <= (m if name == "breadth-first" else 4), where  # its inputs wait for the whole chunk
    assert report.makespan_grouped >= report.makespan, where
    kinds = [part.kind for rank in range(p) for _, part in table.parts(rank) if part.computes]
    stages = table.stages
    assert kinds.count(Kind.F) == kinds.count(Kind.B) == stages * m, where
    assert kinds.count(Kind.W) == (stages * m if name in SPLIT else kinds.count(Kind.W)), where
    busy = sum(span.end - span.start for row in report.spans for span in row)
    assert busy == 3 * stages * m, where  # splitting a backward adds no work


@pytest.mark.parametrize("name", registry.SCHEDULES)
@pytest.mark.parametrize("p", range(2, 9))
def test_every_schedule(name: str, p: int) -> None:
    for v in PER_RANK[registry.SCHEDULES[name].per_rank]:
        for m in SIZES if p in LARGE else range(1, 17):
            check_size(name, p, m, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.SCHEDULES)
def test_every_schedule_at_every_size(name: str) -> None:
    for p in LARGE:
        for v in PER_RANK[registry.SCHEDULES[name].per_rank]:
            for m in range(1, 17):
                check_size(name, p, m, v)


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 2), (3, 3, 1), (1, 2, 1), (2, 1, 1)])
def test_zero_bubble_formulas(costs: tuple[int, int, int]) -> None:
    """ZB-H1 (p-1)(F+B-W) and ZB-H2 (p-1)(F+B-2W), B the input gradient; activations p and 2p-1."""
    f, b, w = costs
    given = Costs(f, b + w, w)
    for p in range(2, 9):
        for m in (2 * p - 1, 2 * p + 3):
            h1, h2 = run("zb-h1", p, m, costs=given), run("zb-h2", p, m, costs=given)
            assert max(h1.idle) == h1.makespan - m * (f + b + w) == (p - 1) * (f + b - w), (p, m)
            assert max(h2.idle) == (p - 1) * (f + b - 2 * w) or b < w, (p, m)
            assert h1.peak == (p,) * p and h2.peak == (2 * p - 1,) * p
        assert max(run("zb-h1", p, p, costs=given).idle) == (p - 1) * (f + b - w)


def test_zbv_has_no_idle_time_and_the_memory_of_1f1b() -> None:
    for p in range(2, 9):
        for m in (2 * p, 2 * p + 3):
            report = run("zbv", p, m)
            assert report.idle == (0,) * p and report.peak == (2 * p,) * p
            assert report.makespan == 6 * m + p - 1  # the last rank can begin no earlier: nothing is shorter


def test_less_memory_for_some_bubble() -> None:
    """Against 1F1B's bubble of 6(p-1) in half-rank units and its 2p half activations."""
    for p in range(2, 9):
        m = 3 * p
        half, least = run("v-half", p, m), run("v-min", p, m)
        assert half.makespan - 6 * m <= 3 * (p - 1) + 1 and max(half.peak) <= p + 2, p
        assert least.makespan - 6 * m <= 4 * (p - 1) + 1 and max(least.peak) <= -(-2 * p // 3) + 2, p


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 2), (2, 2, 1), (3, 3, 2)])
def test_dualpipev_formula(costs: tuple[int, int, int]) -> None:
    """(p-1)(F&B + B - 3W) with the whole backward B; PP+1 activations for the 2p stages."""
    f, b, w = costs
    for p in range(2, 9):
        for m in (2 * p, 2 * p + 1, 3 * p):
            report = run("dualpipev", p, m, costs=Costs(f, b + w, w))
            assert report.makespan - 2 * m * (f + b + w) == (p - 1) * ((f + b + w) + (b + w) - 3 * w), (p, m)
            assert report.peak == (2 * p + 1,) * p


def test_a_pair_is_never_shorter_than_its_parts_one_after_the_other() -> None:
    """What runs waits for a second part's input after the first part: the simulated pair is the upper end of it."""
    for p in (2, 3, 4):
        for way in (0, 0.5, 2):
            table = plan("dualpipev", p, 2 * p + 1)
            rows = tuple(tuple(replace(part, also=None) for a in row for part in a.parts) for row in table.ranks)
            costs = Costs(2, 5, 2, way)
            apart = simulate(replace(table, ranks=rows), costs).makespan
            assert apart <= simulate(table, costs).makespan


def test_breadth_first_and_any_group() -> None:
    for p in range(2, 6):
        for v in (2, 3):
            for m in (p, 2 * p, 3 * p + 1):
                report = run("breadth-first", p, m, v)
                assert report.bubble == ((p - 1) / (v * m),) * p and report.peak == (v * m,) * p
            for group in (p + 1, 2 * p):
                for m in (1, group, 2 * group, 2 * group + 1):
                    report = simulate(plan("interleaved", p, m, v, group))
                    if m % group == 0:
                        assert report.bubble == ((p - 1) / (v * m),) * p, (p, v, m, group)


def check_small_groups(p: int, v: int, m: int) -> None:
    """Groups below p: every forward and backward once, no deadlock, and no rank keeps more than it may run ahead."""
    for group in range(1, p):
        report = simulate(plan("interleaved", p, m, v, group))
        limits = [2 * (p - rank - 1) + (v - 1) * group + 1 for rank in range(p)]
        assert all(kept <= most for kept, most in zip(report.peak, limits, strict=True)), (p, v, m, group)
        assert report.makespan >= 3 * (v * m + p - 1), (p, v, m, group)  # the bubble of a full group is the least


@pytest.mark.parametrize("m", [1, 5, 8])
def test_groups_smaller_than_the_pipeline(m: int) -> None:
    for p in (2, 3, 4, 7):
        check_small_groups(p, 2, m)
    check_small_groups(3, 3, m)
    with pytest.raises(Refused, match="1f1b has no groups"):
        plan("1f1b", 4, 8, 1, 4)


@pytest.mark.slow
def test_small_groups_at_every_size() -> None:
    for p in range(2, 9):
        for v in (2, 3):
            for m in range(1, 17):
                check_small_groups(p, v, m)


def test_placements() -> None:
    assert placement("1f1b", 3, 1) == (0, 1, 2) and placement("interleaved", 2, 2) == (0, 1, 0, 1)
    for name in ("zbv", "v-half", "v-min", "dualpipev"):
        assert placement(name, 3, 1) == placement(name, 3, 2) == (0, 1, 2, 2, 1, 0) == plan(name, 3, 4).placement
        with pytest.raises(Refused, match="two stages per rank"):
            plan(name, 3, 4, 3)
    assert placement("auto", 2, 2) == (0, 1, 0, 1) and placement("auto", 2, 2, memory=2) == (0, 1, 1, 0)
    assert placement("zbv", 1, 1) == (0,)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(registry.SCHEDULES)), st.integers(2, 6), st.integers(1, 12), st.integers(0, 3), st.data())
def test_uneven_costs_never_hang(name: str, p: int, m: int, way: int, data: st.DataObject) -> None:
    """Stages of any cost: the table ends, and no rank does less than its work."""
    v = PER_RANK[registry.SCHEDULES[name].per_rank][0]
    stages = p * v
    numbers = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    forward, inputs, weight = (data.draw(numbers) for _ in range(3))
    costs = Costs(forward, [a + b for a, b in zip(inputs, weight, strict=True)], weight, way)
    report = run(name, p, m, v, costs)
    assert (
        report.makespan_grouped
        >= report.makespan
        >= m * max(sum(forward[s] + inputs[s] + weight[s] for s in plan(name, p, m, v).stages_of(r)) for r in range(p))
    )


def test_evaluation_runs_the_forwards_only() -> None:
    for name in registry.SCHEDULES:
        v = PER_RANK[registry.SCHEDULES[name].per_rank][0]
        table = forward_only(name, 3, 5, v)
        kinds = {action.kind for row in table.ranks for action in row}
        assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F}
        assert sum(a.kind is Kind.F for row in table.ranks for a in row) == 3 * v * 5


def test_exposed_transfers_and_the_critical_path() -> None:
    quiet, still = run("1f1b", 4, 8, costs=Costs(transfer=0.5)), run("1f1b", 4, 8)
    assert still.exposed == (0,) * 4 and min(quiet.exposed) > 0
    path = critical_path(quiet)
    assert path[0][1].start == 0 and path[-1][1].end == quiet.makespan
    for (_, first), (_, then) in zip(path, path[1:], strict=False):
        assert first.end == then.start
    on_the_way = sum(link.end - link.start for _, link in path if isinstance(link, Travel))
    assert on_the_way == quiet.makespan - still.makespan


def test_registry_refusals() -> None:
    with pytest.raises(Refused, match=r"--schedule zbw(.|\n)*zb-h1, zb-h2, zbv(.|\n)*--schedule zbv"):
        registry.build("zbw", 4, 8)


def test_short_functions() -> None:
    """The schedules stay small enough to be read."""
    import inspect

    for module in (schedules, vshape):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                assert len(inspect.getsource(function).splitlines()) < 40, name


def test_text_of_pairs_and_splits_reads_back() -> None:
    for name in ("dualpipev", "zbv", "zb-h2"):
        table = plan(name, 3, 7)
        assert Schedule.from_text(table.to_text()) == table
