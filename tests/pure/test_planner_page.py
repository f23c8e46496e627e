"""What docs/planner.md says is what the planner finds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from isotron.config.schema import PRESETS
from isotron.core.parallel.plan import Layout
from isotron.planner.block_time import FORMS, Place
from isotron.planner.calibrate import scores, split
from isotron.planner.definitions import utilisation
from isotron.planner.efficiency import fitted, stack_for
from isotron.planner.hardware import GIB, find
from isotron.planner.job import Job
from isotron.planner.memory import plan_memory
from isotron.planner.published import cases
from isotron.planner.search import MARGIN, named, search
from isotron.planner.shapes import MILESTONES
from isotron.planner.time import step_seconds

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def table(pattern: str) -> list[tuple[str, ...]]:
    return re.findall(pattern, PAGE, re.M)


def test_the_errors_on_the_page() -> None:
    rows = table(r"^\| (\w+) \| (\d+) \| ([\d.]+) % \| (\d+) % \| (\d+) \| ([\d.]+|-)(?: %)? \| (\d+|-)(?: %)? \|$")
    train, held = split(cases())
    found = {s.source: s for s in scores(train, fitted())}, {s.source: s for s in scores(held, fitted())}
    assert {r[0] for r in rows} == set(found[0]) | set(found[1])
    for source, *numbers in rows:
        for part, (runs, median, worst) in zip(found, (numbers[:3], numbers[3:]), strict=True):
            s = part.get(source)
            assert int(runs) == (s.runs if s else 0), source
            if s is not None:
                assert 100 * s.median == pytest.approx(float(median), abs=0.06)
                assert 100 * s.worst == pytest.approx(float(worst), abs=0.6)


GUIDE = table(r"^\| ([\w.-]+) \| (\d+) \| (\d+) \| (\d+) \| (tp [^|]+?) \|$")


@pytest.mark.parametrize(("name", "devices", "batch", "seq", "said"), GUIDE)
def test_the_guide_says_what_a_search_finds(name: str, devices: str, batch: str, seq: str, said: str) -> None:
    config = replace(MILESTONES[name][0] if name in MILESTONES else PRESETS[name], max_position_embeddings=int(seq))
    place = Place(find("h100"), stack_for("h100"))
    job = Job(config, Layout(dp=1), int(seq), 1, int(batch))
    limit = place.device.memory * MARGIN
    best = search(job, int(devices), place, limit, 3).best[0]
    assert named(best.job.layout) == said and best.exact and best.memory <= limit


EXAMPLE = table(r"^\| (\d) \| (none|selective|full) \| (yes|no) \| (\d) \| (\d+) \| (\d+) \|")


@pytest.mark.parametrize(("micro", "recompute", "sp", "vpp", "gib", "seconds"), EXAMPLE)
def test_the_175b_example(micro: str, recompute: str, sp: str, vpp: str, gib: str, seconds: str) -> None:
    schedule = "interleaved" if vpp != "1" else "1f1b"
    layout = Layout(8, 8, 1, int(vpp), sp == "yes", 0, schedule, recompute=recompute)
    job = Job(MILESTONES["gpt3-175b"][0], layout, 2048, int(micro), 1024)
    device = find("a100-80")
    assert max(b.total for b in plan_memory(job, device.context)) / GIB == pytest.approx(float(gib), abs=0.6)
    assert step_seconds(job, Place(device, stack_for("a100-80"))).total == pytest.approx(float(seconds), rel=0.02)


def test_megatrons_weak_scaling_beside_what_is_planned() -> None:
    """Model FLOPs utilisation in percent by devices: published, and planned."""
    text = " ".join(PAGE.split())
    found = re.findall(r"([\d.]+)B on (\d+)(?: devices|:) (\d+) %, (?:planned )?(\d+) %", text)
    said = {int(devices): (int(theirs), int(ours)) for _, devices, theirs, ours in found}
    rows = {int(c.row["n_gpus"]): c for c in cases() if c.source == "mcoreh100"}
    assert said.keys() == rows.keys() and len(rows) == 5
    for devices, c in rows.items():
        place = c.place()
        planned = utilisation(c.job, step_seconds(c.job, place).total, place.device.peak(FORMS[place.form]))
        assert said[devices] == (
            round(100 * float(c.row["mfu"])),
            pytest.approx(100 * planned["megatron"]["of_peak"], abs=0.6),
        ), devices


def test_the_page_has_its_tables() -> None:
    assert len(GUIDE) >= 5 and len(EXAMPLE) >= 6
