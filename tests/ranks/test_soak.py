"""The soak, short: each kind of fault once, random layouts, and the weights of an undisturbed run at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import soak


def test_a_short_soak(tmp_path: Path) -> None:
    tally = soak.soak(20, 3, tmp_path, ("kill", "kill-save", "flip a file"))
    assert tally.codes[0] == 1 and sum(tally.faults.values()) >= 2


@pytest.mark.slow
def test_a_longer_soak(tmp_path: Path) -> None:
    tally = soak.soak(150, 5, tmp_path)
    assert tally.codes[0] == 1 and set(tally.faults) == set(soak.FAULTS)
