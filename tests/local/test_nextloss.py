"""The file with the loss of the step after a checkpoint, where it cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotron.train.nextloss import FILE, Facts, NextLoss


def test_each_place_gets_its_own(tmp_path: Path) -> None:
    """A save in the run's directory may end long after the step behind it, one near by before it."""
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir(), far.mkdir()
    kept = NextLoss({"near": True, "far": True})
    kept.saved(1, near, "near")
    kept.after(Facts(2, 8, 0.5), ["near", "far"])
    assert (near / FILE).is_file() and not (far / FILE).exists()
    kept.after(Facts(3, 12, 0.4), [])
    kept.saved(1, far, "far")
    assert (far / FILE).read_text() == (near / FILE).read_text()


def test_a_place_that_is_gone_is_reported(tmp_path: Path) -> None:
    kept = NextLoss({"near": True})
    kept.saved(1, tmp_path / "gone", "near")
    with pytest.raises(OSError, match="gone"):
        kept.after(Facts(2, 8, 0.5), ["near"])
    NextLoss({"near": False}).saved(1, tmp_path / "gone", "near")
