"""What all tiers share: the option that turns the long tests on, the skips, and how two workers deal the files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from isotron import processes

# what nearly every test of several processes needs, loaded once by the server that they are forked from; torch's
# recompute reads the compiler's settings
STACK = ["torch._dynamo", "isotron.train.main", "isotron.train.verify", "tests.ranks.bodies", "tests.ranks.runs"]
# by seconds: what takes longest begins first, so that no worker is left alone with it
FIRST = (
    "ranks/test_zero.py",
    "local/test_docs.py",
    "ranks/test_matrix.py",
    "ranks/test_special.py",
    "ranks/test_resume.py",
    "ranks/test_hub_layouts.py",
    "ranks/test_run_faults.py",
    "ranks/test_moe_matrix.py",
    "ranks/test_schedules.py",
    "ranks/test_optimizers.py",
    "ranks/test_inference_ranks.py",
    "ranks/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow, such as the full matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=_turn)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def _turn(item: pytest.Item) -> int:
    """When an item's file begins."""
    return next((i for i, start in enumerate(FIRST) if item.nodeid.startswith(f"tests/{start}")), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a file at a time, in the order above: its cases share fixtures, processes and references."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def stack() -> Iterator[None]:
    """The fork server of this session has the training stack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "PRELOAD", [*processes.PRELOAD, *STACK])
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch, as on the ranks: what one process computes is then summed in the same order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
