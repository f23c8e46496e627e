"""What pyproject.toml asks for, in the files of versions that tests are run with."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from isotron.config.tables import tomllib

ROOT = Path(__file__).parents[2]


def requirements() -> dict[str, list[Requirement]]:
    """By extra, "" for what is always needed; this project's own extras left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    found = {extra: [Requirement(line) for line in lines] for extra, lines in asked.items()}
    return {extra: [r for r in rs if r.name != project["name"]] for extra, rs in found.items()}


def pins(file: str) -> dict[str, list[str]]:
    """Versions by name."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            (one,) = pin.specifier
            assert one.operator == "==", line
            found.setdefault(canonicalize_name(pin.name), []).append(one.version)
    return found


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lts.txt"])
def test_every_requirement_has_a_pin_that_meets_it(file: str) -> None:
    pinned = pins(file)
    for extra, asked in requirements().items():
        if extra == "lts" and "lts" not in file:  # an extra of its own, for the older torch
            continue
        for requirement in asked:
            versions = pinned.get(canonicalize_name(requirement.name), [])
            assert versions, f"{file} has no version for {requirement} of [{extra or 'dependencies'}]"
            assert all(v in requirement.specifier for v in versions), (file, extra, str(requirement), versions)
