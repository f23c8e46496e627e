"""Weights that come and go and gradients that wait, as actions of the table: under a budget, and the fewer gathers and
sums the larger it is.
"""

from __future__ import annotations

import pytest

from isotron.core.errors import Refused
from isotron.core.parallel.pipeline.actions import Kind, Schedule
from isotron.core.parallel.pipeline.library import forward_only, plan
from isotron.core.parallel.pipeline.live import with_sums, with_weights
from isotron.core.parallel.pipeline.simulate import Costs, simulate
from isotron.core.parallel.pipeline.tables import parse, to_csv

TABLES = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2), ("dualpipev", 2)]
SIZES = (7, 5, 6, 9, 8, 4, 3, 10, 5, 6, 7, 8, 9, 4, 6, 5)


def costs(table: Schedule) -> Costs:
    return Costs(weights=SIZES[: table.stages])


@pytest.mark.parametrize(("name", "v"), TABLES)
@pytest.mark.parametrize("m", [1, 4, 8])
def test_a_larger_budget_gathers_less_and_never_more_than_it_allows(name: str, v: int, m: int) -> None:
    table = plan(name, 4, m, v)
    sizes = dict(enumerate(SIZES[: table.stages]))
    before = [2 * m * sum(sizes[s] for s in table.stages_of(rank)) for rank in range(4)]
    assert list(simulate(table, costs(table)).gathers) == before
    everything = sum(SIZES)
    for budget in (1, 6, 10, 14, 20, everything):
        report = simulate(with_weights(table, sizes, budget), costs(table))
        assert max(report.gathered) <= budget
        assert all(now <= then for now, then in zip(report.gathers, before, strict=True))
        before = list(report.gathers) if budget >= max(SIZES) else before  # smaller ones leave stages out
    assert before == [sum(sizes[s] for s in table.stages_of(rank)) for rank in range(4)]


def test_nothing_but_weights_changes() -> None:
    table = plan("zbv", 2, 4, 2)
    with_them = with_weights(table, {0: 3, 3: 3}, 4)
    rows = [[a for a in row if a.kind not in (Kind.UNSHARD, Kind.RESHARD)] for row in with_them.ranks]
    assert rows == [list(row) for row in table.ranks]
    assert with_them.ranks[1] == table.ranks[1]  # sizes of others are not known here, and not needed
    assert Schedule.from_text(with_them.to_text()) == with_them


def test_a_stage_of_one_rank_stays_from_its_first_use_to_its_last() -> None:
    table = with_weights(plan("1f1b", 1, 3), {0: 5}, 5)
    assert " ".join(map(str, table.ranks[0])) == "UNSHARD0 F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 RESHARD0 REDUCE0"
    evaluation = with_weights(forward_only("1f1b", 1, 2), {0: 5}, 5)
    assert " ".join(map(str, evaluation.ranks[0])) == "UNSHARD0 F0.0 F0.1 RESHARD0"


def test_weights_are_asked_for_one_action_ahead_and_those_needed_last_go() -> None:
    table = Schedule("t", plan("interleaved", 1, 1, 3).ranks, (0, 0, 0), 1)
    found = with_weights(table, {0: 1, 1: 1, 2: 1}, 2)
    words = " ".join(str(a) for a in found.ranks[0] if a.kind is not Kind.REDUCE)
    assert words == (
        "UNSHARD0 UNSHARD1 F0.0 F1.0 RESHARD0 UNSHARD2 F2.0 B2.0 RESHARD2 UNSHARD0 B1.0 RESHARD1 B0.0 RESHARD0"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("UNSHARD0 UNSHARD0 F0.0 B0.0 RESHARD0", "gathered already"),
        ("F0.0 RESHARD0 B0.0", "not gathered"),
        ("UNSHARD0 F0.0 B0.0", "stay after the step"),
    ],
)
def test_what_does_not_come_and_go_in_turn_is_refused(row: str, says: str) -> None:
    table = Schedule.from_text(f"# t microbatches=1 placement=0\n0: {row}\n")
    with pytest.raises(Refused, match=says):
        simulate(table)


@pytest.mark.parametrize(("name", "v"), TABLES)
@pytest.mark.parametrize("m", [1, 4, 8])
def test_a_larger_budget_sums_less_and_keeps_never_more_than_it_allows(name: str, v: int, m: int) -> None:
    table = plan(name, 4, m, v)
    sizes = dict(enumerate(SIZES[: table.stages]))
    gradients = Costs(gradients=SIZES[: table.stages])
    once = [sum(sizes[s] for s in table.stages_of(rank)) for rank in range(4)]
    before = [m * total for total in once]
    for budget in (0, 1, 6, 10, 14, 20, sum(SIZES)):
        summed = with_sums(table, sizes, budget)
        report = simulate(summed, gradients)
        assert max(report.waiting) <= budget and budget or list(report.sums) == [m * total for total in once]
        assert all(now <= then for now, then in zip(report.sums, before, strict=True)), budget
        before = list(report.sums) if budget >= max(SIZES) else before
        assert Schedule.from_text(summed.to_text()) == summed
        assert parse(to_csv(summed), name).ranks == summed.ranks
    assert before == once and summed == table


def test_a_sum_stands_behind_the_last_gradient_and_its_send() -> None:
    table = with_sums(plan("zb-h1", 2, 2), {0: 1, 1: 1}, 0)
    assert " ".join(map(str, table.ranks[1])).endswith("B1.1 SEND_B1.1 W1.0 REDUCE1 W1.1 REDUCE1")
    table = with_sums(plan("1f1b", 2, 2), {1: 1}, 0)
    assert " ".join(map(str, table.ranks[1])) == (
        "RECV_F1.0 F1.0 RECV_F1.1 B1.0 SEND_B1.0 REDUCE1 F1.1 B1.1 SEND_B1.1 REDUCE1"
    )
    assert table.ranks[0] == plan("1f1b", 2, 2).ranks[0]  # sizes of others are not known here, and not needed


def test_those_that_are_needed_last_are_summed_first() -> None:
    """Stage 0 alternates with 1, and then with 2: under a budget of one stage, 0 waits until 1 and 2 are through."""
    text = "# t microbatches=2 placement=0,0,0\n0: F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 B0.0 B0.1\n"
    found = with_sums(Schedule.from_text(text), {0: 1, 1: 1, 2: 1}, 1)
    words = " ".join(str(a) for a in found.ranks[0] if a.kind is not Kind.F)
    assert words == "B2.0 B1.0 REDUCE1 B2.1 REDUCE2 B1.1 REDUCE1 B0.0 B0.1 REDUCE0"


def test_a_table_that_chooses_its_sums_keeps_them() -> None:
    text = "# t microbatches=3 placement=0\n0: F0.0 B0.0 F0.1 B0.1 REDUCE0 F0.2 B0.2 REDUCE0\n"
    table = Schedule.from_text(text)
    assert with_sums(table, {0: 5}, 0) == table
    report = simulate(table, Costs(gradients=5))
    assert report.waiting == (5,) and report.sums == (10,)


@pytest.mark.parametrize("row", ["REDUCE0 F0.0 B0.0 REDUCE0", "F0.0 B0.0 REDUCE0 REDUCE0"])
def test_a_sum_of_nothing_is_refused(row: str) -> None:
    with pytest.raises(Refused, match="no gradient of the stage"):
        simulate(Schedule.from_text(f"# t microbatches=1 placement=0\n0: {row}\n"))
