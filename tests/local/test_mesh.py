"""Ranks, coordinates and groups, without any process: groups are not connected here."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.core.mesh import AXES, Mesh, coordinate_of, rank_of


@pytest.fixture(autouse=True)
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "_connect", lambda self, ranks: None)


def groups(axis: str, **sizes: int) -> list[tuple[int, ...]]:
    world = 1
    for n in sizes.values():
        world *= n
    return sorted({Mesh(rank, **sizes).group(axis).ranks for rank in range(world)})


def test_sixteen_ranks_as_megatron_numbers_them() -> None:
    sizes = {"tp": 2, "dp": 2, "pp": 4}
    assert groups("tp", **sizes) == [(i, i + 1) for i in range(0, 16, 2)]
    assert groups("dp", **sizes)[:3] == [(0, 2), (1, 3), (4, 6)]
    assert groups("pp", **sizes) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


def test_context_ranks_lie_between_tensor_and_data_ranks() -> None:
    mesh = Mesh(0, tp=2, cp=2, dp=2, pp=2)
    assert mesh.group("tp").ranks == (0, 1) and mesh.group("cp").ranks == (0, 2)
    assert mesh.group("dp").ranks == (0, 4) and mesh.group("pp").ranks == (0, 8)
    assert mesh.group("cp", "dp").ranks == mesh.group("dp", "cp").ranks == (0, 2, 4, 6)
    assert mesh.group(*AXES).ranks == tuple(range(16))


@settings(max_examples=50, deadline=None)
@given(st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}))
def test_groups_along_an_axis_partition_the_world(sizes: dict[str, int]) -> None:
    world = 1
    for n in sizes.values():
        world *= n
    for rank in range(world):
        assert rank_of(coordinate_of(rank, sizes), sizes) == rank
    for axis in AXES:
        members = Counter(
            rank for ranks in {Mesh(r, **sizes).ranks_along(axis) for r in range(world)} for rank in ranks
        )
        assert members == Counter(range(world))
    for rank in range(world):
        mesh = Mesh(rank, **sizes)
        for axis in AXES:
            group = mesh.group(axis)
            assert group.size == sizes[axis] and group.ranks[group.index] == rank
            assert group.index == mesh.coordinate[axis]
            assert list(group.ranks) == sorted(group.ranks)  # the order of the process group behind it


def test_neighbours_that_share_a_key_value_head() -> None:
    assert Mesh(5, tp=8).subgroup("tp", 2).ranks == (4, 5)
    assert Mesh(5, tp=8).subgroup("tp", 4).ranks == (4, 5, 6, 7)
    assert Mesh(13, tp=8, pp=2).subgroup("tp", 2).ranks == (12, 13)
    mesh = Mesh(5, tp=8)
    assert mesh.subgroup("tp", 8) is mesh.group("tp")  # made once


def test_the_members_of_a_group_stand_in_the_order_in_which_torch_gathers() -> None:
    """A tie of the last stage with the first, as a table names it; and no group may be asked for otherwise."""
    mesh = Mesh(0, pp=3)
    tied = mesh.places("pp", [2, 0, 2])
    assert tied is not None and tied.ranks == (0, 2)
    for ranks in ((1, 0), (0, 0)):
        with pytest.raises(ValueError, match="ascend"):
            mesh.group_of(ranks)
