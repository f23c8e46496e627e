"""The file with the loss of the step after a checkpoint, where it cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotron.train.nextloss import FILE, Facts, NextLoss


def test_a_save_may_end_before_the_step_behind_it_or_long_after(tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    early.mkdir(), late.mkdir()
    before, behind = NextLoss(True), NextLoss(True)
    before.saved(1, early)
    for kept in (before, behind):
        kept.after(Facts(2, 8, 0.5))
    assert (early / FILE).is_file() and not (late / FILE).exists()
    behind.saved(1, late)
    assert (late / FILE).read_text() == (early / FILE).read_text()
    (late / FILE).unlink()
    behind.saved(2, late)
    assert not (late / FILE).exists()


def test_a_place_that_is_gone_is_reported(tmp_path: Path) -> None:
    kept = NextLoss(True)
    kept.saved(1, tmp_path / "gone")
    with pytest.raises(OSError, match="gone"):
        kept.after(Facts(2, 8, 0.5))
    other = NextLoss(False)
    other.saved(1, tmp_path / "gone")
    other.after(Facts(2, 8, 0.5))
