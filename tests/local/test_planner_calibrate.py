"""`isotron plan --calibrate` measures this machine; the file it writes describes a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotron import cli
from isotron.launch import close_all
from isotron.planner.hardware import find


def test_the_file_describes_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    assert cli.main(["plan", "--calibrate", str(path)]) == 0
    assert "written:" in capsys.readouterr().out
    device = find(str(path))
    assert device.name == "machine" and 1e9 < device.peak("float32") < 1e16 and 1e8 < device.bandwidth < 1e14
    assert device.node >= 1 and device.inner > 0
    assert cli.main(["plan", "--preset", "llama-tiny", "--gpus", "2", "--gpu", str(path), "--seq", "128"]) == 0
    assert "legal layouts" in capsys.readouterr().out
    close_all()


def test_the_file_is_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--calibrate", "machine.json"]) == 2
    assert "--calibrate machine.toml" in capsys.readouterr().err
