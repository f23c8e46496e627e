"""Documents of a global batch dealt to groups of 1, 2 and 4 ranks: the numbers of one process, in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isotron.core.mesh import ALONE
from isotron.core.parallel.dealt import documents, joined_rows
from isotron.train.verify import Case, microbatches
from tests.context_matrix import MODELS
from tests.covering import Case as Choice
from tests.covering import covering, uncovered
from tests.dealt_matrix import AXES, BASE, case_of, legal
from tests.dealt_matrix import MODELS as DEALT
from tests.matrix import equals_one_process
from tests.ranks.bodies import build, evaluated

PAIRS = covering(AXES, legal)
VALUES = {(axis, value) for axis, values in AXES.items() for value in values}
OFTEN: list[Choice] = []
while left := VALUES - {item for c in OFTEN for item in c.items()}:
    OFTEN.append(max(PAIRS, key=lambda c: len(left & set(c.items()))))

FOUR_SLOTS = Case(MODELS["gqa"], replace(BASE, max_seqlen_per_dp_cp_rank=4), 16, 1, 4, steps=2, isolate=True)
OTHERS = {
    "as few documents as rows: shared by all": replace(
        FOUR_SLOTS, layout=replace(FOUR_SLOTS.layout, hybrid_costs=(1.0, 0.01, 64.0))
    ),
    "heads dealt to 2 and to 4 ranks, some dropped": replace(
        FOUR_SLOTS, model=DEALT["dropout"], layout=replace(FOUR_SLOTS.layout, cp_comm_type=("a2a",))
    ),
    "a step without tokens": replace(FOUR_SLOTS, masked_steps=(1,)),
}


def name_of(choice: Choice) -> str:
    return "-".join(str(value) for value in choice.values())


def test_every_value_of_every_feature_and_with_slow_every_pair() -> None:
    assert uncovered(PAIRS, AXES, legal) == set() and len(OFTEN) < len(PAIRS) / 3


@pytest.mark.parametrize("choice", OFTEN, ids=name_of)
def test_the_numbers_of_one_process(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("choice", [c for c in PAIRS if c not in OFTEN], ids=name_of)
def test_every_pair(ranks: Callable[..., list[Any]], choice: Choice) -> None:
    equals_one_process(ranks, case_of(choice), name_of(choice))


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps(ranks: Callable[..., list[Any]], name: str) -> None:
    equals_one_process(ranks, OTHERS[name], name)


def test_whole_rows_on_ranks_that_are_no_power_of_two(ranks: Callable[..., list[Any]]) -> None:
    """As an evaluation deals them: a ring of its own over cp."""
    case = replace(FOUR_SLOTS, sequence=12, isolate=False)
    split = replace(case, layout=replace(BASE, cp=3, dp=1, max_seqlen_per_dp_cp_rank=12))
    alone = evaluated(replace(case, layout=replace(BASE, dp=1, hybrid_context_parallel=False)))
    assert all(found == pytest.approx(alone, rel=1e-9) for found in ranks(3, evaluated, split))


def group_sizes(case: Case) -> list[tuple[int, int, float]]:
    """(ranks, slots, tokens that count) of this rank's microbatches, and what is evaluated of them."""
    model = build(case)
    batches = model.deal(microbatches(replace(case, micro_batch=1), 0, model.mesh.group("tp")))
    assert model.count_tokens(batches) > 0
    return [(len(b.part.runs), b.shape[1], float(b.loss_mask.sum())) for b in batches if b.part is not None]


def test_groups_and_rows(ranks: Callable[..., list[Any]]) -> None:
    found = ranks(4, group_sizes, FOUR_SLOTS)
    assert all({size for size, _, _ in mine} == {2, 4} for mine in found)
    assert all(slots <= 4 for mine in found for _, slots, _ in mine)
    rows = joined_rows(microbatches(replace(FOUR_SLOTS, micro_batch=1), 0, ALONE))
    assert sum(tokens for mine in found for _, _, tokens in mine) == float(rows.loss_mask.sum())
    assert {p.length for p in documents(rows)} == {5, 11} and len(documents(rows, every=True)) == 8


def test_rounds_are_as_many_on_every_rank(ranks: Callable[..., list[Any]]) -> None:
    """Where ranks meet in every microbatch, those with fewer have empty ones behind."""
    layout = replace(BASE, max_seqlen_per_dp_cp_rank=8)
    alone, met = (ranks(4, group_sizes, replace(FOUR_SLOTS, layout=replace(layout, zero=zero))) for zero in (1, 2))
    assert len({len(mine) for mine in alone}) > 1 and len({len(mine) for mine in met}) == 1
    assert [[m for m in mine if m[2]] for mine in met] == [[m for m in mine if m[2]] for mine in alone]


def test_a_step_is_played_again_with_a_clock_per_rank() -> None:
    """What is waited for is there when its sender has got to it, whatever shared the core meanwhile; what nobody sends
    is an error.
    """
    spec = importlib.util.spec_from_file_location("own_cores", Path(__file__).parents[2] / "benchmarks/own_cores.py")
    assert spec is not None and spec.loader is not None
    cores = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = cores  # where its dataclasses look for their types
    spec.loader.exec_module(cores)
    sends = [cores.Note("send", (((0, 1), 1),), 1.0), cores.Note("end", (), 1.5)]
    waits = [cores.Note("begins to wait", (), 0.2), cores.Note("wait", (((0, 1), 1),), 0.3), cores.Note("end", (), 0.5)]
    assert cores.played([sends, waits]) == pytest.approx([1.5, 1.0 + 0.1 + 0.2])
    with pytest.raises(RuntimeError, match="nobody sends"):
        cores.played([sends[1:], waits])
