from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import covering, product_of, uncovered


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_pair_occurs(sizes: list[int]) -> None:
    axes = {f"axis{i}": tuple(range(n)) for i, n in enumerate(sizes)}
    cases = covering(axes)
    assert uncovered(cases, axes) == set()
    assert len(cases) <= len(product_of(axes))


def test_illegal_pairs_neither_occur_nor_count() -> None:
    axes = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1)}

    def legal(case: dict[str, int]) -> bool:
        return not (case["a"] == 2 and case["b"] == 1)

    cases = covering(axes, legal)
    assert all(map(legal, cases))
    assert uncovered(cases, axes, legal) == set()
    assert uncovered(cases[:-1], axes, legal)


def test_the_set_is_small() -> None:
    axes = {f"axis{i}": (0, 1, 2) for i in range(6)}
    assert len(covering(axes)) <= 20  # of 729
