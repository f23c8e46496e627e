"""`isotron schedule`: what it prints and writes, the case of 175B, and its refusals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from isotron.commands import schedule as command
from isotron.core.errors import Refused
from isotron.core.parallel.pipeline.actions import Kind, Schedule
from isotron.core.parallel.pipeline.events import LANES, predicted, read_events, trace_file
from isotron.core.parallel.pipeline.library import plan
from isotron.core.parallel.pipeline.picture import svg
from isotron.core.parallel.pipeline.simulate import Costs, simulate
from isotron.core.parallel.pipeline.study import study, target
from isotron.core.parallel.pipeline.tables import parse

CASE = "interleaved --pp 8 --global-batch-size 1024 --micro-batch-size 4 --target-bubble 15"


def printed(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert command.run(line.split()) == 0
    return capsys.readouterr().out


def result(capsys: pytest.CaptureFixture[str], line: str) -> Any:
    return json.loads(printed(capsys, line + " --json"))


def test_the_grid_and_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "zbv --pp 4 --microbatches 8 --width 400")
    assert "rank 3 |.........a0>b0>a1>b1>" in text and "6.25 %" in text and "0.00 %" in text
    short = printed(capsys, "zbv --pp 4 --microbatches 8 --width 60")
    assert all(len(line) <= 60 and line.endswith(" ...") for line in short.splitlines() if line.startswith("rank"))


def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "zb-h1 --pp 4 --microbatches 8")
    assert found["bubble"] == 3 / 24 and found["peak_activations"] == [4, 4, 4, 4]
    assert found["idle"] == [3, 2, 1, 0] and found["makespan"] == 27
    assert found["critical_path"][0] == "F0.0" and found["exposed_transfers"] == [0, 0, 0, 0]
    costly = result(capsys, "1f1b --pp 4 --microbatches 8 --schedule-costs 10,10,10,2")
    assert costly["exposed_transfers"][0] > 0 and costly["critical_path_transfers"] > 0


def test_the_case_of_175b(capsys: pytest.CaptureFixture[str]) -> None:
    """64 devices as TP8 x PP8, 1024 sequences in microbatches of 4: 256 microbatches."""
    found = result(capsys, f"{CASE} --vpp 1,2")
    assert [f["schedule"] for f in found] == ["1f1b", "interleaved"]
    assert [round(100 * f["bubble"], 2) for f in found] == [2.73, 1.37]
    assert [round(100 * 7 / (v * 256), 2) for v in (3, 4, 6, 12)] == [0.91, 0.68, 0.46, 0.23]  # simulated below
    wanted = found[0]["target"]
    assert wanted["microbatches"] == pytest.approx(7 / 0.15) and round(wanted["global_batch_size"]) == 187
    near = [(n["global_batch_size"], round(100 * n["bubble"], 2)) for n in wanted["near"]]
    assert near == [(184, 15.22), (188, 14.89)]
    text = printed(capsys, f"{CASE} --vpp 1 --global-batch-size 128")
    assert "21.88 %" in text and "15 % with 1f1b, 1 per rank: 46.67 microbatches" in text
    assert "188 sequences) give 14.89 %" in text


def test_times_have_one_unit_for_any_number_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 microbatches of 3 forwards' work each: 24, and the bubble."""
    trace = tmp_path / "zbv.json"
    for line, v, time in (("zbv", 2, 25.5), ("auto", 2, 25.5), ("1f1b", 1, 33), ("interleaved --vpp 3", 3, 27)):
        asked = f"{line} --pp 4 --microbatches 8"
        found = result(capsys, f"{asked} --trace {trace}")
        assert found["vpp"] == v and found["makespan"] == time == 24 * (1 + found["bubble"])
        assert found["unit"] == "forwards of all layers of a rank for one microbatch"
        text = printed(capsys, asked)
        assert f" {time:g} " in text and "time: of a step, as waits in forwards of all layers" in text
        ends = [e.end for e in read_events(json.loads(trace.read_text(encoding="utf-8")), LANES[0])]
        assert max(ends) == 1000 * time
        costly = result(capsys, f"{asked} --schedule-costs 1,1,1")
        assert costly["makespan"] == pytest.approx(time) and costly["idle"] == pytest.approx(found["idle"])


@pytest.mark.slow
@pytest.mark.parametrize("v, percent", [(3, 0.91), (4, 0.68), (6, 0.46), (12, 0.23)])
def test_the_case_of_175b_with_more_stages(v: int, percent: float) -> None:
    shown = study("interleaved", 8, 256, v)
    assert shown.bubble == pytest.approx(7 / (v * 256)) and round(100 * shown.bubble, 2) == percent
    assert target(study("interleaved", 8, 32, v), 0.15).exact == pytest.approx(7 / (0.15 * v))


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / n) for n in ("a.svg", "a.json", "a.csv", "a.txt")]
    picture, trace, table, text = names
    printed(capsys, f"dualpipev --pp 3 --microbatches 7 --svg {picture} --trace {trace} --table {table}")
    printed(capsys, f"dualpipev --pp 3 --microbatches 7 --table {text}")
    wanted = plan("dualpipev", 3, 7)
    assert Schedule.from_text(Path(text).read_text(encoding="utf-8")) == wanted
    assert parse(Path(table).read_text(encoding="utf-8"), "dualpipev") == wanted
    cells = [e for e in ElementTree.parse(picture).iter() if e.tag.endswith("rect")]
    assert len(cells) > 3 * 2 * 7 * 2
    events = read_events(json.loads(Path(trace).read_text(encoding="utf-8")), LANES[0])
    assert {e.rank for e in events} == {0, 1, 2} and sum(len(e.name.split("&")) for e in events) >= 3 * 2 * 7 * 2
    again = result(capsys, f"{table}")
    assert again["pp"] == 3 and again["vpp"] == 2 and again["microbatches"] == 7


def test_a_trace_holds_every_action_and_transfer() -> None:
    report = simulate(plan("interleaved", 2, 4, 2), Costs(transfer=0.5))
    trace = json.loads(json.dumps(trace_file(predicted(report), 1000.0, {"note": "x"})))
    compute, travels = (read_events(trace, lane) for lane in LANES[:2])
    assert [e.name for e in compute if e.rank == 1] == [str(s.action) for s in report.spans[1]]
    assert len(travels) == len(report.travels) and {e.end - e.start for e in travels} == {500}
    assert max(e.end for e in compute) == 1000 * report.makespan
    assert read_events(trace, LANES[0], (Kind.B,))[0].name.startswith("B")
    names = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == [(r, lane) for r in range(2) for lane in LANES[:2]]


def test_a_picture_says_what_it_shows() -> None:
    table = plan("zb-h1", 2, 3)
    text = svg(table, simulate(table), "a & b")
    ElementTree.fromstring(text)
    assert "a &amp; b" in text and text.count("<title>W") == 6


def test_auto_names_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "auto --pp 4 --microbatches 6 --schedule-memory 2 --schedule-costs 10,14,11,1")
    assert max(found["peak_activations"]) <= 2
    free = result(capsys, "auto --pp 4 --microbatches 6 --schedule-costs 10,14,11,1")
    assert free["unit"] == "the unit of the costs"
    assert free["makespan"] <= found["makespan"] and max(free["peak_activations"]) <= 4


def test_costs_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, numbers = tmp_path / "step.json", "10,14,11,1,20,24,21,0"
    content = {"traceEvents": [], "otherData": {"schedule_costs": [int(n) for n in numbers.split(",")]}}
    file.write_text(json.dumps(content), encoding="utf-8")
    asked = "auto --pp 2 --microbatches 4"
    assert f"measured: --schedule-costs {numbers}" in printed(capsys, f"{asked} --schedule-costs-from {file}")
    found = result(capsys, f"{asked} --schedule-costs-from {file}")
    assert found == result(capsys, f"{asked} --schedule-costs {numbers}")
    assert found["makespan"] <= result(capsys, f"zb-h1 --pp 2 --microbatches 4 --schedule-costs {numbers}")["makespan"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "isotron schedule zbv --pp 4"),
        ("--pp 4", "isotron schedule without a name"),
        ("zbw --pp 4", "--schedule zbv"),
        ("1f1b --pp 0", "--pp 1"),
        ("1f1b --vpp 2", "--schedule interleaved --vpp 2"),
        ("1f1b --global-batch-size 10 --micro-batch-size 4", "--global-batch-size 8"),
        ("1f1b --svg a.png", "--svg schedule.svg"),
        ("1f1b --trace a.svg", "--trace schedule.json"),
        ("1f1b --table a.json", "--table schedule.csv"),
        ("nowhere.csv", "it cannot be read"),
        ("1f1b --schedule-costs 1,2", "1,1,1,0"),
        ("1f1b --schedule-costs-from nowhere.json", "not a trace of a step"),
        ("1f1b --lr 3", "not of this command"),
        ("--schedule zbv --pp 3 --microbatches 1", "try:    leave it out\n"),
        ("1f1b --pp 2 --target-bubble -1", "--target-bubble 15"),
        ("1f1b --pp 2 --target-bubble 200", "--target-bubble 15"),
    ],
)
def test_refusals(line: str, words: str) -> None:
    with pytest.raises(Refused, match=words.replace("(", r"\(")) as refused:
        command.run(line.split())
    assert "checkpoint" not in str(refused.value)  # a schedule has nothing to do with one


def test_help_names_every_option() -> None:
    text = command.help_text()
    assert all(option.flag in text for option in command.OWN.values())
    assert "v-half" in text
