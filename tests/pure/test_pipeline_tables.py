"""Pipeline tables: text form, what can be asked for, and every schedule at every size proved and measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isotron.core.errors import Refused
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.draw import grid
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.passes import with_communication, with_reduce
from isotron.core.parallel.pipeline.registry import build
from isotron.core.parallel.pipeline.simulate import Costs, simulate


def refused(text: str, call, *args) -> None:
    with pytest.raises(Refused) as error:
        call(*args)
    problem = error.value.problems[0]
    assert problem.asked and problem.case and problem.fix
    assert text in str(problem), str(problem)


@pytest.mark.parametrize("text", ["F0.3", "SEND_F1.2", "RECV_B10.11", "REDUCE2", "UNSHARD0", "F0.3&B1.2"])
def test_action_text(text):
    assert str(Action.parse(text)) == text


def test_action_fields():
    assert Action.parse("SEND_B3.1") == Action(Kind.SEND_B, 3, 1)
    assert Action.parse("REDUCE2") == Action(Kind.REDUCE, 2)
    assert Action.parse("F0.3&B1.2").parts == (Action(Kind.F, 0, 3, Action(Kind.B, 1, 2)), Action(Kind.B, 1, 2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("X0.1", "'X0.1'"),
        ("F", "'F'"),
        ("F0", "names a microbatch"),
        ("REDUCE0.1", "a whole stage"),
        ("SEND_X0.1", "SEND_X"),
    ],
)
def test_action_text_refused(text, says):
    refused(says, Action.parse, text)


def test_table_text():
    for args in [("gpipe", 3, 4), ("1f1b", 4, 6), ("interleaved", 2, 5, 3), ("1f1b", 1, 2, 2)]:
        table = plan(*args)
        assert Schedule.from_text(table.to_text()) == table
        assert len(table.to_text().splitlines()) == 1 + len(table.ranks)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty text"),
        ("0: F0.0", "begins with '0: F0.0'"),
        ("# a microbatches=1 placement=0\n1: F0.0 B0.0", "the line of rank 0"),
        ("# a microbatches=1 placement=0\n0: F0.0 B0,0", "action 'B0,0'"),
    ],
)
def test_table_text_refused(text, says):
    refused(says, Schedule.from_text, text)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("1f1bb", 2, 2, 1), "--schedule 1f1b"),
        (("interleaved", 2, 4, 1), "--vpp 2"),
        (("1f1b", 2, 4, 2), "--schedule interleaved --vpp 2"),
        (("gpipe", 2, 4, 3), "gpipe has one stage per rank"),
        (("1f1b", 0, 4, 1), "--pp 0"),
        (("1f1b", 2, 0, 1), "microbatches 0"),
        (("interleaved", 2, 4, 0), "--vpp 0"),
    ],
)
def test_build_refused(args, says):
    refused(says, build, *args)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("v", [1, 3])
def test_one_rank(name, v):
    table = plan(name, 1, 2, v)
    report = simulate(table)
    assert report.makespan == report.makespan_grouped == 6 * v
    assert report.bubble == (0,) and report.peak == (v,) and report.posted == (0,)
    assert not any(action.transfers for action in table.ranks[0])


def test_known_tables():
    one_f_one_b = "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    assert tuple(" ".join(map(str, row)) for row in build("1f1b", 2, 3).ranks) == one_f_one_b
    first = "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    assert " ".join(map(str, build("interleaved", 2, 4, 2).ranks[0])) == first
    struck = " ".join(word for word in first.split() if not word.endswith(".3"))
    assert " ".join(map(str, build("interleaved", 2, 3, 2).ranks[0])) == struck
    assert build("interleaved", 2, 3, 2).placement == (0, 1, 0, 1)


def every_size(numbers=range(1, 17)):
    """(name, p, m, v) for all schedules up to 8 ranks, 16 microbatches, 3 stages per rank."""
    for p in range(2, 9):
        for m in numbers:
            yield "gpipe", p, m, 1
            yield "1f1b", p, m, 1
            yield from (("interleaved", p, m, v) for v in (2, 3))


@pytest.mark.slow
def test_every_size():
    check_closed_forms(every_size())


def test_some_sizes():
    check_closed_forms(every_size((1, 2, 7, 8, 12)))


def check_closed_forms(sizes):
    """No deadlock under either kind of communication; bubbles, activations and receives as the closed forms say."""
    for name, p, m, v in sizes:
        report = simulate(with_reduce(with_communication(build(name, p, m, v))))
        where = name, p, m, v
        assert max(report.posted) <= 3, where
        if name != "interleaved" or m % p == 0:
            assert report.bubble == ((p - 1) / (v * m),) * p, where
            assert report.makespan_grouped == report.makespan == 3 * (v * m + p - 1), where
        if name == "gpipe":
            assert report.peak == (m,) * p, where
        elif name == "1f1b":
            assert report.peak == tuple(min(p - rank, m) for rank in range(p)), where
        else:
            padded = -(-m // p) * p
            bound = [min(2 * (p - rank - 1) + (v - 1) * p + 1, v * padded) for rank in range(p)]
            assert all(peak <= most for peak, most in zip(report.peak, bound, strict=True)), where
            if m % p == 0:
                assert list(report.peak) == bound, where


def test_transfers_hide_behind_computing():
    """Interleaved has slack of one forward and one backward: a transfer up to a quarter of a forward costs little."""
    still, moving = (simulate(plan("interleaved", 4, 16, 2), Costs(transfer=t)).makespan for t in (0, 0.25))
    assert (moving - still) / still < 0.04
    exposed = simulate(plan("1f1b", 4, 16), Costs(transfer=0.25)).makespan
    assert (exposed - 57) / 57 > 0.1  # 1F1B waits for both ways of every microbatch


def test_costs_per_stage():
    report = simulate(plan("1f1b", 2, 4), Costs(forward=(1, 3), backward=(2, 6), activation=(10, 20)))
    assert report.makespan == 1 + 4 * 9 + 2  # the slow rank never waits once it has begun
    assert report.bubble == ((39 - 12) / 12, (39 - 36) / 36)
    assert report.peak == (20, 20)
    refused("costs.forward with 3 numbers", simulate, plan("1f1b", 2, 4), Costs(forward=(1, 2, 3)))


def test_deferred_weight_gradient():
    text = "# w microbatches=2 placement=0,1\n0: F0.0 F0.1 B0.0 W0.0 B0.1 W0.1\n1: F1.0 B1.0 F1.1 B1.1 W1.0 W1.1\n"
    table = with_reduce(with_communication(Schedule.from_text(text)))
    report = simulate(table)
    assert report.makespan == 7 and report.peak == (2, 2)  # 9 with whole backwards
    assert [str(a) for a in table.ranks[0][-2:]] == ["W0.1", "REDUCE0"]


def test_overlapped_pair():
    text = "# pair microbatches=2 placement=0,1\n0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 F1.1&B1.0 B1.1\n"
    table = with_communication(Schedule.from_text(text))
    report = simulate(table)
    assert [span.end - span.start for span in report.spans[1]] == [1, 3, 2]
    assert report.peak == (2, 2)
    assert grid(table)[1].endswith("|..0>1&0>>>1<<<....|")


def test_reduce_comes_last_whichever_pass_comes_first():
    for args in [("1f1b", 3, 4), ("interleaved", 2, 4, 2), ("gpipe", 2, 1), ("1f1b", 1, 3, 2)]:
        bare = build(*args)
        assert with_reduce(with_communication(bare)) == with_communication(with_reduce(bare)) == plan(*args)
        for row in plan(*args).ranks:
            words = [str(action) for action in row]
            for stage in {action.stage for action in row}:
                last = max(i for i, action in enumerate(row) if action.kind is Kind.B and action.stage == stage)
                between = row[last + 1 : words.index(f"REDUCE{stage}")]
                assert all(action.transfers or action.kind is Kind.REDUCE for action in between)


def test_sends_follow_their_producer_and_peers_stand_together():
    for args in [("1f1b", 4, 6), ("interleaved", 4, 8, 2)]:
        table = plan(*args)
        for row in table.ranks:
            for position, action in enumerate(row):
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    before = [a for a in row[:position] if a.computes][-1]
                    assert (before.kind, before.stage, before.microbatch) == (
                        Kind.F if action.kind is Kind.SEND_F else Kind.B,
                        action.stage,
                        action.microbatch,
                    )
    # the exchange of 1F1B: output out and gradient in, with the same neighbour, as one call
    assert "F1.1 SEND_F1.1 RECV_B1.0 B1.0 SEND_B1.0 RECV_F1.2 F1.2" in plan("1f1b", 3, 4).to_text()


def test_communication_twice_is_refused():
    refused("it has transfers already", with_communication, plan("1f1b", 2, 2))


def test_impossible_order_is_refused():
    text = "# bad microbatches=2 placement=0,1\n0: F0.0 B0.0 F0.1 B0.1\n1: F1.1 B1.1 F1.0 B1.0\n"
    refused("in a circle", with_communication, Schedule.from_text(text))


def test_plan_is_cached():
    assert plan("1f1b", 2, 4, 1) is plan("1f1b", 2, 4, 1)


def test_picture():
    assert grid(plan("1f1b", 2, 3)) == [
        "rank 0 |0>1>....0<<<2>1<<<..2<<<|",
        "rank 1 |..0>0<<<1>1<<<2>2<<<....|",
    ]
    lines = grid(plan("interleaved", 2, 2, 2), Costs(transfer=0.5))
    assert len({len(line) for line in lines}) == 1 and lines[0].startswith("rank 0 |a0>a1>")


def test_the_page_about_pipelines(capsys):
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/pipeline.md", "exec"), {})
    printed = capsys.readouterr().out
    assert plan("1f1b", 4, 6).to_text() in printed
    (picture,) = re.findall(r"```\n(rank 0.*?)```", page, re.DOTALL)
    assert picture in printed
