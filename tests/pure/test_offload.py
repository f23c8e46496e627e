"""How much of a rank's state lives on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isotron.core.parallel.offload import hosted
from isotron.core.parallel.plan import Layout


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.0, 0), (0.01, 1), (0.1, 1), (0.11, 2), (0.5, 3), (0.6, 3), (0.61, 4), (1.0, 4)]
)
def test_the_fewest_tensors_that_make_up_the_share(fraction: float, count: int) -> None:
    assert hosted([10, 20, 30, 40], fraction) == count


def test_nothing_to_step() -> None:
    assert hosted([], 1.0) == hosted([], 0.0) == 0


def test_a_layout_says_what_is_offloaded() -> None:
    assert Layout().offload.fraction == 0 and Layout(optimizer_offload_fraction=0.5).offload.fraction == 0
    assert Layout(optimizer_cpu_offload=True).offload.fraction == 1
    away = Layout(optimizer_cpu_offload=True, optimizer_offload_fraction=0.3, offload_dir="d", offload_weights=True)
    assert away.offload.directory == away.offload.weights_directory == away.files_for("activations") == "d"
    only = replace(away, offload_dir_for=("weights",))
    assert only.offload.weights_directory == "d" and only.offload.directory == only.files_for("activations") == ""
