"""The soak, short: faults, random layouts, and in the end the weights of undisturbed runs, to rounding and bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import soak


def test_a_short_soak(tmp_path: Path) -> None:
    """The first attempt dies in a save, whatever the machine's speed; a signal may come after a quick one's end."""
    tally = soak.soak(14, 5, tmp_path, ("kill-save", "SIGKILL"))
    assert tally.codes[0] == 1 and sum(tally.faults.values()) >= 1


@pytest.mark.slow
def test_a_longer_soak(tmp_path: Path) -> None:
    tally = soak.soak(150, 5, tmp_path)
    assert tally.codes[0] == 1 and set(tally.faults) > {*soak.INSIDE, *soak.BETWEEN}
    assert sum(tally.faults.values()) >= 14
