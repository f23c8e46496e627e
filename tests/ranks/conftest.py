"""Every test of several processes runs on pooled workers: `ranks(world, function, *args)` gives results by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from isotron.launch import close_all, run_ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks` on cached pools, which end with the session."""
    yield run_ranks
    close_all()
