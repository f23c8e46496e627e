"""Every collective against a plain computation, on 2, 3 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ranks import bodies

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("way", ["streams", "slots", "turns", "gloo"])
def test_against_plain_sums(ranks: Ranks, world: int, dtype: str, dim: int, way: str) -> None:
    results = ranks(world, bodies.collectives, dtype, dim, way)
    xs = [np.array(r["x"], float) for r in results]
    flats = [np.array(r["flat"], float) for r in results]
    cuts = results[0]["cuts"]
    total = sum(xs)
    for i, r in enumerate(results):
        own = slice(cuts[i], cuts[i + 1])
        np.testing.assert_array_equal(r["sum"], total)
        np.testing.assert_array_equal(r["sum of a transpose"], total.swapaxes(0, 2))
        np.testing.assert_array_equal(r["max"], np.max(xs, 0))
        np.testing.assert_array_equal(r["all_gather"], np.concatenate(xs, dim))
        np.testing.assert_array_equal(r["reduce_scatter"], np.split(total, world, dim)[i])
        np.testing.assert_array_equal(r["reduce_flat"], sum(flats)[own])
        gathered = np.concatenate([f[a:b] for f, a, b in zip(flats, cuts, cuts[1:], strict=False)])
        np.testing.assert_array_equal(r["gather_flat"], gathered)
        np.testing.assert_array_equal(r["broadcast"], xs[-1])


@pytest.mark.parametrize("way", ["streams", "slots", "turns", "gloo"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_16_bits_are_formed_in_float32(ranks: Ranks, dtype: str, way: str) -> None:
    """256 + 1 is 256 in bfloat16, so 256 + 1 + 1 + 1 tells (the float32 sum 259 rounds to 260)."""
    want = 260.0 if dtype == "bfloat16" else 259.0
    results = ranks(4, bodies.small_sums, dtype, way)
    assert [r[0] for r in results] == [want] * 4  # all_reduce on every rank
    assert results[0][1:] == [want, want]  # reduce_scatter and reduce_flat on the owner


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_of_16_bits_are_summed_in_float32_where_the_transport_would_not(ranks: Ranks, world: int) -> None:
    """As on NCCL: 256 + 1 + 1 + 1 again, in buffers that do not divide by the ranks."""
    want = [256.0, 258.0, 260.0][world - 2]
    assert ranks(world, bodies.flat_sums) == [[want] * 7 + [want] * 2] * world


@pytest.mark.parametrize("way", ["streams", "gloo"])
def test_facts_and_exchanges(ranks: Ranks, way: str) -> None:
    for world in (1, 2, 3):
        results = ranks(world, bodies.facts, way) if world > 1 else ranks(1, bodies.facts_alone)
        if world == 1:
            assert results == [([{"rank": 0}], [0, "x"])]
            continue
        assert results[0][0] == [{"rank": i} for i in range(world)]
        assert all(r[0] is None for r in results[1:])
        assert all(r[1] == [0, "x"] for r in results)
        assert [r[2] for r in results] == [[float(i), float((i - 1) % world)] for i in range(world)]


def test_sums_have_the_same_bits_on_every_rank_and_in_memory_as_over_gloo(ranks: Ranks) -> None:
    """Two ranks' sum is the same either way; more are added in rank order in memory, so all have the same bits."""
    for world in (2, 4):
        slots, turns, gloo = (ranks(world, bodies.random_sums, way) for way in ("slots", "turns", "gloo"))
        assert len(set(slots)) == 1 and turns == slots
        assert world > 2 or slots == gloo


def test_every_group_waits_as_long_as_the_default_group(ranks: Ranks) -> None:
    """torch gives a new group 30 minutes (on GPUs 10), whatever the default group has: the watchdog must be first."""
    assert ranks(8, bodies.timeouts) == [{300.0}] * 8
