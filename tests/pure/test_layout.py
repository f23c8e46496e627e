"""Shards: whatever the split, the ranks' pieces are the global tensor, each element as often as it is replicated."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.layout import Box, Part, Piece, Placed, Rule, Split, Table, cut, rows, shard, whole


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@st.composite
def splits(draw: st.DrawFn) -> tuple[Rule, int]:
    """A fused tensor of 1 to 3 sections over 1, 2 or 4 ranks, replicated where a section has fewer units."""
    of = draw(st.sampled_from((1, 2, 4)))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        unit = draw(st.integers(1, 3))
        if draw(st.booleans()):
            parts.append(Part(of * draw(st.integers(1, 2)), unit))
        elif draw(st.booleans()):
            count = draw(st.integers(1, 3 * of))
            parts.append(Part(count, unit, padded=-(-count // of) * of))
        else:
            parts.append(Part(draw(st.sampled_from([n for n in (1, 2, 4) if n <= of])), unit))
    dim = draw(st.integers(0, 1))
    length = sum(p.count * p.unit for p in parts)
    shape = (length, 2) if dim == 0 else (2, length)
    return Rule("w", shape, Split(dim, tuple(parts)), region="heads"), of


@settings(max_examples=200, deadline=None)
@given(splits())
def test_shards_cover_the_tensor(case: tuple[Rule, int]) -> None:
    rule, of = case
    held: Counter[tuple[int, ...]] = Counter()
    owned: Counter[tuple[int, ...]] = Counter()
    for index in range(of):
        local = shard(rule, {"tp": index}, {"tp": of})
        inside: Counter[tuple[int, ...]] = Counter()
        for piece in local.pieces:
            assert piece.global_box.shape == piece.local_box.shape
            assert piece.local_box.overlap(whole(local.shape)) == piece.local_box
            held.update(elements(piece.global_box))
            inside.update(elements(piece.local_box))
        assert not inside or max(inside.values()) == 1
        for piece in Placed("w", rule, local).owned():
            owned.update(elements(piece.global_box))
    assert owned == Counter(elements(whole(rule.shape)))
    assert held.keys() == owned.keys()


@settings(max_examples=200, deadline=None)
@given(splits(), st.data())
def test_rows_of_a_shard_cover_it(case: tuple[Rule, int], data: st.DataObject) -> None:
    """A local tensor cut into runs of rows still covers the global tensor once."""
    rule, of = case
    seen: Counter[tuple[int, ...]] = Counter()
    for index in range(of):
        local = shard(rule, {"tp": index}, {"tp": of})
        n = local.shape[0]
        at = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
        for start, stop in zip([0, *at], [*at, n], strict=True):
            for piece in Placed("w", rule, local).owned():
                part = piece.restricted(rows(local.shape, start, stop))
                if part is not None:
                    assert part.local_box.overlap(whole((stop - start, *local.shape[1:]))) == part.local_box
                    seen.update(elements(part.global_box))
    assert seen == Counter(elements(whole(rule.shape)))


def test_a_tensor_without_a_split_is_owned_by_the_first_rank() -> None:
    rule = Rule("w", (3, 2))
    owners = [len(Placed("w", rule, shard(rule, {"tp": i}, {"tp": 4})).owned()) for i in range(4)]
    assert owners == [1, 0, 0, 0]
    assert Placed("w", rule, shard(rule, {"tp": 0}, {"tp": 4}), counts=False).owned() == []


@pytest.mark.parametrize(
    "rule, words",
    [
        (Rule("w", (6,), Split(0, (Part(6),)), "heads"), "6 units cannot be split over 4 ranks"),
        (Rule("w", (2,), Split(0, (Part(2),))), "2 units over 4 ranks would be held 2 times"),
        (Rule("w", (5,), Split(0, (Part(4),))), "parts of w sum to 4, dimension 0 is 5"),
    ],
)
def test_what_cannot_be_split(rule: Rule, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shard(rule, {"tp": 0}, {"tp": 4})


def test_a_parameter_without_a_rule_is_an_error() -> None:
    table = Table((Rule("layers.*.w", (2,)),), ties=(("head", "embed"),))
    assert table.rule("layers.3.w").shape == (2,)
    assert table.canonical("head") == "embed" and table.canonical("layers.3.w") == "layers.3.w"
    with pytest.raises(KeyError, match="other"):
        table.rule("other")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), max_size=6), st.integers(1, 8))
def test_cut_at_row_boundaries_nearly_evenly(sizes: list[tuple[int, int]], ways: int) -> None:
    cuts = cut(sizes, ways)
    starts = [0]
    for n, width in sizes:
        starts += [starts[-1] + width * (i + 1) for i in range(n)]
    total = starts[-1]
    assert len(cuts) == ways + 1 and cuts[0] == 0 and cuts[-1] == total
    assert cuts == sorted(cuts) and set(cuts) <= set(starts)
    widest = max((width for _, width in sizes), default=0)
    assert all(abs(c - total * k // ways) <= widest for k, c in enumerate(cuts))


def test_boxes() -> None:
    a, b = Box((0, 2), (4, 4)), Box((2, 0), (4, 4))
    assert a.overlap(b) == Box((2, 2), (2, 2)) == b.overlap(a)
    assert a.overlap(Box((4, 2), (1, 1))) is None
    assert a.overlap(b).relative_to(a).shifted(a.offset) == Box((2, 2), (2, 2))
    assert a.size == 16 and a.slices() == (slice(0, 4), slice(2, 6))
    assert Piece(a, whole((4, 4))).restricted(Box((1, 1), (2, 2))) == Piece(Box((1, 3), (2, 2)), whole((2, 2)))
