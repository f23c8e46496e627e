"""metrics.jsonl, the console lines and the curves of a run."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from isotron.core.errors import Refused
from isotron.train import metrics as module
from isotron.train.config import LogConfig
from isotron.train.metrics import Metrics, StepRecord, cut, json_line

QUIET = LogConfig(log_interval=0, tensorboard=False)


@dataclass(frozen=True)
class Layout:
    tp: int = 2
    pp: int = 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **changes: Any) -> StepRecord:
    plain = StepRecord(
        step=step,
        loss=10.0 / step,
        grad_norm=1.2345,
        lr=1e-3,
        tokens=1000,
        consumed_samples=8 * step,
        step_time_s=0.5,
        flops_per_s_per_device=2e13,
        skipped=False,
        sample_ids=(8 * step - 8, 8 * step - 1),
    )
    return replace(plain, **changes)


def reject(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=reject) for line in text.splitlines()]


def write(directory: Path, steps: range, resume: int = 0, log: LogConfig = QUIET, stream: Any = None) -> str:
    stream = stream or io.StringIO()
    metrics = Metrics(directory, log, True, resume, stream)
    metrics.start(resume, 10, 2, Layout(), peak_flops=1e14)
    for step in steps:
        metrics.step(record(step))
    metrics.close()
    return stream.getvalue()


# ---- metrics.jsonl -------------------------------------------------------------------------------------------------


def test_a_step_has_every_field_in_full_precision(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.start(0, 10, 2, Layout(), peak_flops=1e14)
    metrics.step(record(1, loss=0.1 + 0.2, aux={"balance": 0.25}))
    line = lines(tmp_path)[1]
    assert line == {
        "step": 1,
        "loss": 0.30000000000000004,
        "grad_norm": 1.2345,
        "lr": 1e-3,
        "tokens": 1000,
        "consumed_samples": 8,
        "step_time_s": 0.5,
        "data_wait_s": 0.0,
        "tokens_per_s": 2000.0,
        "tflops_per_device": 20.0,
        "mfu": 0.2,
        "skipped": False,
        "sample_ids": [0, 7],
        "aux/balance": 0.25,
    }
    metrics.close()


def test_utilisation_is_null_where_the_peak_is_unknown(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.start(0, 10, 1, Layout())
    metrics.step(record(1))
    assert lines(tmp_path)[1]["mfu"] is None
    metrics.close()


def test_each_start_is_an_event_with_step_world_and_layout(tmp_path):
    write(tmp_path, range(1, 4))
    write(tmp_path, range(4, 6), resume=3)
    starts = [line for line in lines(tmp_path) if line.get("event") == "start"]
    assert [(s["step"], s["world"], s["layout"]) for s in starts] == [(n, 2, {"tp": 2, "pp": 1}) for n in (0, 3)]
    assert all(re.match(r"\d{4}-\d\d-\d\dT", s["time"]) for s in starts)
    assert [line["step"] for line in lines(tmp_path) if "loss" in line] == [1, 2, 3, 4, 5]


def test_events_carry_the_last_step(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.step(record(4))
    metrics.event("saved", seconds=1.5)
    metrics.event("stopped", step=7)
    assert [(e["event"], e["step"]) for e in lines(tmp_path)[1:]] == [("saved", 4), ("stopped", 7)]
    metrics.close()


def test_evaluations_carry_loss_and_perplexity(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.evaluation(5, "valid", 2.0, 640, 0.25)
    metrics.evaluation(6, "test", 1e4, 640, 0.25)
    good, huge = lines(tmp_path)
    assert good == {
        "step": 5, "eval": "valid", "eval_loss": 2.0, "eval_ppl": math.exp(2.0), "tokens": 640, "eval_time_s": 0.25
    }  # fmt: skip
    assert huge["eval_ppl"] is None and huge["nonfinite"] == {"eval_ppl": "inf"}
    metrics.close()


def test_what_is_no_number_is_null_and_named(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.step(record(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    (line,) = lines(tmp_path)
    assert line["loss"] is None and line["grad_norm"] is None and line["skipped"] is True
    assert line["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    assert "nonfinite" not in json.loads(json_line({"loss": 1.0}))
    metrics.close()


def test_a_resume_cuts_what_came_after_its_step_and_says_so(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.start(0, 10, 2, Layout())
    for step in range(1, 8):
        metrics.step(record(step))
        if step % 3 == 0:
            metrics.evaluation(step, "valid", 1.0, 640, 0.25)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 8, "lo')  # killed while writing
    shown = write(tmp_path, range(5, 7), resume=4)
    found = lines(tmp_path)
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in found if "eval" in line] == [3]
    assert "5 lines of an earlier attempt after step 4 cut" in shown
    assert not (tmp_path / "metrics.jsonl.tmp").exists()


def test_lines_before_a_torn_one_stay_and_nothing_is_rewritten_without_need(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut(path, 3) == 0
    path.write_text('{"step": 1}\nnot json\n[1]\n{"step": 2}\n{"step": 3')
    assert cut(path, 9) == 3
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    before = path.stat().st_ino
    assert cut(path, 2) == 0 and path.stat().st_ino == before


def test_only_the_first_rank_writes(tmp_path):
    stream = io.StringIO()
    metrics = Metrics(tmp_path / "run", LogConfig(), False, 0, stream)
    metrics.start(0, 10, 2, Layout())
    metrics.step(record(1))
    metrics.evaluation(1, "valid", 1.0, 640, 0.25)
    metrics.event("saved")
    metrics.say("hello")
    metrics.close()
    assert not (tmp_path / "run").exists() and stream.getvalue() == ""


def test_a_closed_log_stays_closed(tmp_path):
    metrics = Metrics(tmp_path, QUIET, True, 0, io.StringIO())
    metrics.close()
    metrics.close()
    metrics.step(record(1))
    assert (tmp_path / "metrics.jsonl").read_text() == ""


# ---- the console ---------------------------------------------------------------------------------------------------

LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): ([\d.]+) \| throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \| "
    r"tokens per second: ([\d.]+) \| learning rate: (\S+) \| global batch size: +(\d+) \| lm loss: (\S+) \| "
    r"(?:loss scale: ([\d.]+) \| )?grad norm: (\S+) \| number of skipped iterations: +(\d+) \| "
    r"number of nan iterations: +(\d+) \|$"
)


def test_the_line_has_megatrons_wording():
    shown = write_to_console(LogConfig(log_interval=1, tensorboard=False), [record(5, loss=2.5)])
    match = LINE.match(shown)
    assert match, shown
    assert match.groups() == (
        *("5", "10", "40", "500.0", "20.0", "2000.0", "1.000000E-03", "8", "2.500000E+00", None, "1.234", "0", "0"),
    )


def write_to_console(log: LogConfig, records: list[StepRecord]) -> str:
    from isotron.train.console import Console

    stream = io.StringIO()
    console = Console(log.log_interval, stream)
    console.start(0, 10)
    for r in records:
        console.step(r)
    console.close()
    return stream.getvalue().rstrip("\n")


def test_counts_go_on_after_a_resume():
    from isotron.train.console import step_line

    records = [record(5), record(6, loss=math.nan, skipped=True)]
    assert "skipped iterations:   4 | number of nan iterations:   2 |" in step_line(records, 10, (3, 1))


def test_a_line_covers_the_steps_since_the_last_one():
    log = LogConfig(log_interval=3, tensorboard=False)
    records = [
        record(1, loss=4.0, step_time_s=1.0),
        record(2, loss=math.nan, skipped=True, step_time_s=2.0),
        record(3, loss=2.0, step_time_s=3.0),
        record(4, loss=9.0),
        record(10, loss=1.0),  # the last step is always shown
    ]
    first, last = write_to_console(log, records).splitlines()
    groups = LINE.match(first).groups()
    assert groups[3] == "2000.0" and groups[5] == "500.0"
    assert groups[8] == "3.000000E+00" and groups[11:] == ("1", "1")
    assert LINE.match(last).groups()[8] == "5.000000E+00" and LINE.match(last).groups()[11:] == ("1", "1")


def test_a_line_of_skipped_steps_and_a_slow_device():
    bad = record(1, loss=math.nan, grad_norm=math.nan, skipped=True, flops_per_s_per_device=2.5e9, loss_scale=2.0**32)
    groups = LINE.match(write_to_console(LogConfig(), [bad])).groups()
    assert groups[4] == "0.0025" and groups[8] == "NAN" and groups[9] == "4294967296.0" and groups[10] == "nan"


def test_evaluation_lines(tmp_path):
    stream = io.StringIO()
    metrics = Metrics(tmp_path, QUIET, True, 0, stream)
    metrics.evaluation(5, "valid", 2.0, 640, 0.25)
    metrics.evaluation(9, "test", 2.0, 640, 0.25)
    metrics.close()
    first, second = stream.getvalue().splitlines()
    numbers = "lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert first == f" validation loss at iteration 5 | {numbers}"
    assert second == f" validation loss at iteration 9 on test set | {numbers}"


def test_a_terminal_gets_a_bar_below_unbroken_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout
    shown = write(tmp_path, range(1, 4), log=LogConfig(log_interval=1, tensorboard=False), stream=Terminal())
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert "train" in plain and "/10" in plain and "loss" in plain
    assert sum(bool(LINE.match(line.strip("\r"))) for line in re.split(r"[\n\r]", plain)) == 3
    assert sys.stdout is before


def test_lines_are_plain_elsewhere(tmp_path):
    shown = write(tmp_path, range(1, 4), log=LogConfig(log_interval=1, tensorboard=False))
    assert "\x1b" not in shown and all(LINE.match(line) for line in shown.splitlines())


# ---- curves elsewhere ----------------------------------------------------------------------------------------------


def test_tensorboard_shows_the_resumed_curve_only(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = LogConfig(log_interval=0)
    write(tmp_path, range(1, 6), log=log)
    metrics = Metrics(tmp_path, log, True, 3, io.StringIO())
    metrics.step(record(4, loss=7.0, aux={"balance": 0.5}))
    metrics.evaluation(4, "valid", 3.0, 640, 0.25)
    metrics.close()
    found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    points = [(e.step, e.value) for e in found.Scalars("loss")]
    assert points == [(1, 10.0), (2, 5.0), (3, pytest.approx(10 / 3)), (4, 7.0)]
    assert [e.value for e in found.Scalars("eval_loss/valid")] == [3.0]
    assert {"grad_norm", "lr", "tokens_per_s", "aux/balance"} <= set(found.Tags()["scalars"])
    assert "loss_scale" not in found.Tags()["scalars"]  # only float16 has one


def test_without_tensorboard_a_run_goes_on_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [n for n in sys.modules if n.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    shown = write(tmp_path, range(1, 3), log=LogConfig(log_interval=0))
    assert shown.count("\n") == 1 and "no TensorBoard files" in shown
    assert len(lines(tmp_path)) == 3


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.config = types.SimpleNamespace(update=lambda facts, allow_val_change: self.calls.append(facts))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(values)

    def finish(self) -> None:
        self.calls.append("finish")


def test_weights_and_biases_gets_the_same_numbers_in_one_run(tmp_path, monkeypatch):
    run, starts = FakeRun(), []
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    fake.init = lambda **options: (starts.append(options), run)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = LogConfig(log_interval=0, tensorboard=False, wandb_project="p", wandb_exp_name="n")
    write(tmp_path, range(1, 3), log=log)
    write(tmp_path, range(2, 3), resume=1, log=log)
    assert [(s["project"], s["name"], s["resume"]) for s in starts] == [("p", "n", "allow")] * 2
    assert starts[0]["id"] == starts[1]["id"] and starts[0]["dir"] == str(tmp_path)
    assert run.calls[1]["world"] == 2 and run.calls[2]["step"] == 1 and run.calls[2]["loss"] == 10.0
    assert run.calls.count("finish") == 2


@pytest.mark.parametrize("is_main", [True, False])
def test_a_project_without_the_package_is_refused_on_every_rank(tmp_path, monkeypatch, is_main):
    monkeypatch.setattr("isotron.train.trackers.find_spec", lambda name: None)
    with pytest.raises(Refused) as refused:
        Metrics(tmp_path / "run", LogConfig(wandb_project="p"), is_main, 0)
    assert "--wandb-project p" in str(refused.value) and "pip install wandb" in str(refused.value)
    assert refused.value.exit_code == 2 and not (tmp_path / "run").exists()


def test_the_module_loads_without_trackers():
    names = ("tensorboard", "wandb", "rich")
    assert not {n for n in vars(module) if n in names}
