"""What all tiers share: the option that turns the long tests on, and the skips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow, such as the full matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("slow")]
    if not config.getoption("--slow"):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs --slow"))
    # tests of several processes share pools of workers and the cores: `pytest -n 2` runs them one after the other
    for item in items:
        if RANKS in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch, as on the ranks: what one process computes is then summed in the same order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
