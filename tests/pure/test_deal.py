"""Documents dealt to groups of ranks: each once, within its room, with equal work; no two ranks wait for each other."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from isotron.core.errors import Refused
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.deal import Costs, Piece, Share, deal, document_costs, evened, largest_group, loads, sizes_of

COSTS = Costs(1.0, 0.01)


def long_tail(count: int, seed: int, most: int) -> list[Piece]:
    draw = random.Random(seed)
    lengths = [min(int(draw.lognormvariate(4.0, 1.2)) + 1, most) for _ in range(count)]
    return [Piece(i, 0, n) for i, n in enumerate(lengths)]


def test_groups_are_powers_of_two_that_divide_the_ranks():
    assert [largest_group(n) for n in (1, 2, 3, 6, 8, 12)] == [1, 2, 1, 2, 8, 4]
    assert sizes_of(8) == (1, 2, 4, 8) and sizes_of(6) == (1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_document_once_within_its_room(ranks, seed):
    pieces = long_tail(60, seed, 512 * largest_group(ranks))
    shares = deal(pieces, ranks, 512, COSTS)
    assert sorted((p for s in shares for p in s.pieces), key=lambda p: p.row) == pieces
    for share in shares:
        assert share.first % share.size == 0 and share.size & (share.size - 1) == 0
        assert sum(p.length for p in share.pieces) <= 512 * share.size
        assert len(share.pieces) <= 1 or share.size == 1
    assert all(any(s.has(rank) for s in shares) for rank in range(ranks))
    for rank in range(ranks):  # the same order everywhere: from the largest group to the smallest
        assert all(a.size >= b.size for a, b in pairwise(s for s in shares if s.has(rank)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_work_is_equal(ranks, seed):
    pieces = long_tail(200, seed, 512 * ranks)
    found = loads(deal(pieces, ranks, 512, COSTS), ranks, COSTS)
    assert max(found) <= 1.03 * sum(found) / ranks


@pytest.mark.parametrize("seed", range(4))
def test_messages_are_work_of_those_who_share(seed):
    """Long documents in groups of some of the ranks: the others are given more of the short ones."""
    costs = Costs(1.0, 0.001, message=0.3)
    pieces = [*long_tail(300, seed, 512), *(Piece(300 + i, 0, 1500) for i in range(5))]
    blind, seeing = (loads(deal(pieces, 8, 512, c), 8, costs) for c in (replace(costs, message=0.0), costs))
    assert max(seeing) <= 1.02 * sum(seeing) / 8 < max(blind)
    assert costs.share(100, 1) == costs.of(100) and costs.share(100, 4) == (costs.of(100) + 0.3 * 300) / 4


def test_a_document_that_would_keep_others_waiting_is_shared():
    pieces = [Piece(0, 0, 400), *(Piece(i, 0, 10) for i in range(1, 5))]
    shares = deal(pieces, 4, 512, COSTS)  # it fits one rank, with nearly all the work
    assert [s.size for s in shares if s.pieces and s.pieces[0].row == 0] == [4]


def test_ranks_without_documents_get_an_empty_row():
    assert [(s.first, s.size, s.pieces) for s in deal([], 2, 8, COSTS)] == [(0, 1, ()), (1, 1, ())]


def test_a_document_too_long_for_all_is_refused():
    with pytest.raises(Refused, match="at most 4 of 12 ranks, 250 slots each"):
        deal([Piece(0, 0, 1000)], 12, 100, COSTS)


def test_costs_of_a_model():
    config = LlamaConfig(2, 32, 8, 2, 0, 48, 131, 16)
    costs = document_costs(config)
    block = 32 * (8 + 2 * 2) * 4 + 32 * 32 + 3 * 32 * 48
    assert costs == Costs(2 * block + 131 * 32, 2 * 2 * 32, 64 * (2 * block + 131 * 32))


def test_rows_stay_where_little_is_saved():
    """Two long documents fill two rows: nothing to win. Where they leave the last chunk to others there is."""
    costs = replace(COSTS, microbatch=64.0)
    few = [Piece(0, 0, 3980), Piece(0, 3980, 20), Piece(1, 0, 3990), Piece(1, 3990, 10)]
    shares = deal(few, 4, 1024, costs)
    assert [(s.first, s.size, len(s.pieces)) for s in shares] == [(0, 4, 2), (0, 4, 2)]
    assert all(s.size < 4 or len(s.pieces) == 1 for s in deal(few, 4, 1024, COSTS))
    assert max(loads(shares, 4, costs)) <= 1.05 * max(loads(deal(few, 4, 1024, COSTS), 4, costs))
    uneven = [Piece(0, 0, 3500), Piece(0, 3500, 500), Piece(1, 0, 3800), Piece(1, 3800, 200)]
    assert {s.size for s in deal(uneven, 4, 1024, costs)} == {1, 4}
    # what a member of a group has of a row of several documents: all pairs together, none twice
    row = Share(0, 4, tuple(few[:2]))
    pairs = [x - 1000 - 64 for x in loads([row], 4, Costs(1.0, 1.0, 64.0))]
    assert sum(pairs) == 3980 * 3981 / 2 + 20 * 21 / 2


def test_empty_microbatches_make_rounds():
    shares = [Share(0, 2, (Piece(0, 0, 9),)), Share(0, 1, (Piece(1, 0, 4),)), Share(0, 1, (Piece(2, 0, 4),))]
    found = evened(shares, 2)
    assert found[:3] == shares and found[3:] == [Share(1, 1, ()), Share(1, 1, ())]
    assert evened(found, 2) == found
