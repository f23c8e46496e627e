"""Broken pipeline tables are caught and correct ones of any shape are not."""

from __future__ import annotations

import random

import pytest

from isotron.core.errors import Refused
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.passes import with_communication, with_reduce
from isotron.core.parallel.pipeline.simulate import Costs, simulate

GOOD = """# good microbatches=2 placement=0,1
0: F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1 REDUCE0
1: RECV_F1.0 F1.0 RECV_F1.1 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1 REDUCE1
"""


def says(text: str, *words: str) -> None:
    """The table is refused in three lines with all the words."""
    with pytest.raises(Refused) as error:
        simulate(Schedule.from_text(text))
    message = str(error.value)
    assert message.count("\n") == 2
    for word in words:
        assert word in message, message


def test_good():
    assert simulate(Schedule.from_text(GOOD)).makespan == 9
    assert Schedule.from_text(GOOD).ranks == plan("1f1b", 2, 2).ranks


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" SEND_F0.1", "", ("rank 0, SEND_F0.1", "missing", "F1.1 needs F0.1")),
        (" RECV_B0.1", "", ("rank 0, RECV_B0.1", "missing", "B0.1 needs B1.1")),
        (" B1.1", "", ("rank 1, B1.1", "missing")),
        (" F1.1", "", ("rank 1, F1.1", "missing")),
        ("F0.1 ", "F0.1 F0.1 ", ("rank 0, F0.1", "twice")),
        ("SEND_B1.0 ", "SEND_B1.0 SEND_B1.0 ", ("rank 1, SEND_B1.0", "twice")),
        ("F1.1 B1.1", "B1.1 F1.1", ("rank 1, B1.1", "does not come after F1.1")),
        ("F0.0 SEND_F0.0", "SEND_F0.0 F0.0", ("rank 0, SEND_F0.0", "before F0.0")),
        ("RECV_F1.0 F1.0", "F1.0 RECV_F1.0", ("rank 1, RECV_F1.0", "after F1.0")),
        ("B1.1 SEND_B1.1 REDUCE1", "REDUCE1 B1.1 SEND_B1.1", ("rank 1, REDUCE1", "does not come after B1.1")),
        ("F0.0 SEND", "F1.0 SEND", ("rank 0, F1.0", "stage 1 is not on this rank")),
        ("B0.1 REDUCE0", "B0.1 REDUCE7", ("rank 0, REDUCE7", "stage 7 is not on this rank")),
        ("B0.1 REDUCE0", "B0.1 B0.2", ("rank 0, B0.2", "2 microbatches")),
        ("B0.1 REDUCE0", "B0.1 SEND_B0.1", ("rank 0, SEND_B0.1", "nowhere")),
        ("B0.1 REDUCE0", "W0.1 B0.1", ("rank 0, W0.1", "does not come after B0.1")),
        ("F0.0 SEND_F0.0", "F0.0&SEND_F0.0", ("rank 0, F0.0&SEND_F0.0", "only compute actions overlap")),
        ("RECV_F1.0 F1.0 RECV_F1.1", "RECV_F1.1 RECV_F1.0 F1.0", ("rank 1, RECV_F1.1", "SEND_F0.1 after SEND_F0.0")),
    ],
)
def test_broken(old, new, words):
    assert old in GOOD
    says(GOOD.replace(old, new, 1), *words)


def test_action_without_its_number():
    good = Schedule.from_text(GOOD)
    odd = Schedule("odd", ((*good.ranks[0], Action(Kind.F, 0)), good.ranks[1]), good.placement, 2)
    with pytest.raises(Refused, match="rank 0, F0"):
        simulate(odd)


def test_deadlock_of_the_compute_order():
    says(
        "# stuck microbatches=2 placement=0,1\n"
        "0: F0.0 SEND_F0.0 RECV_B0.0 B0.0 F0.1 SEND_F0.1 RECV_B0.1 B0.1\n"
        "1: RECV_F1.0 F1.0 RECV_F1.1 F1.1 B1.0 SEND_B1.0 B1.1 SEND_B1.1\n",
        "deadlock with tagged transfers",
        "rank 0 B0.0",
        "rank 1 F1.1",
    )


def test_deadlock_of_calls_only():
    """A receive posted ahead of the send that it depends on: fine where transfers are on their own, not in calls."""
    says(
        "# calls microbatches=1 placement=0,1\n0: RECV_B0.0 F0.0 SEND_F0.0 B0.0\n1: RECV_F1.0 F1.0 B1.0 SEND_B1.0\n",
        "deadlock in grouped calls",
        "RECV_B0.0",
        "SEND_F0.0",
    )


def random_table(rng: random.Random) -> Schedule:
    """A training step in a random correct order on randomly placed stages, some weight gradients deferred."""
    stages, ranks, microbatches = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 5)
    placement = tuple(rng.randrange(ranks) for _ in range(stages))
    before: dict[Action, list[Action]] = {}
    for m in range(microbatches):
        for s in range(stages):
            forward, backward = Action(Kind.F, s, m), Action(Kind.B, s, m)
            before[forward] = [Action(Kind.F, s - 1, m)] if s else []
            before[backward] = [forward if s == stages - 1 else Action(Kind.B, s + 1, m)]
            if rng.random() < 0.4:
                before[Action(Kind.W, s, m)] = [backward]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while len(done) < len(before):
        action = rng.choice([a for a, needs in before.items() if a not in done and all(n in done for n in needs)])
        rows[placement[action.stage]].append(action)
        done.add(action)
    return Schedule("random", tuple(map(tuple, rows)), placement, microbatches)


def test_any_correct_order_gets_transfers_that_end():
    rng = random.Random(7)
    for _ in range(150):
        table = with_reduce(with_communication(random_table(rng)))
        report = simulate(table, Costs(transfer=1))
        assert report.makespan_grouped >= report.makespan, table.to_text()


def test_a_lost_action_is_always_caught():
    table = plan("interleaved", 2, 3, 2)
    for rank, row in enumerate(table.ranks):
        for position, action in enumerate(row):
            if action.kind is Kind.REDUCE:
                continue
            rows = list(table.ranks)
            rows[rank] = row[:position] + row[position + 1 :]
            with pytest.raises(Refused, match=f"rank {rank}, {action}"):
                simulate(Schedule(table.name, tuple(rows), table.placement, table.microbatches))
