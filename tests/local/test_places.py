"""Where a run may write: found out before the first step, whatever stands in the way; files that fail mid-way."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from isotron.cli import main
from isotron.commands.train import left_behind
from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.checkpoint.ranks import SingleRank
from isotron.core.checkpoint.save import SPARE_BYTES, save_checkpoint
from isotron.core.errors import Refused, refuse_file
from isotron.supervise import run_local
from isotron.train import places
from isotron.train.places import claim
from tests.local.test_checkpoint import one, values

TINY = shlex.split(
    "train --num-layers 1 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 8 --seq-length 8 --vocab-size 20 "
    "--train-iters 2 --eval-iters 0 --device cpu --mock-data --no-tensorboard"
)


@pytest.mark.parametrize("option", ["--run-dir", "--save", "--local-save"])
@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing", "not for us"])
def test_a_place_that_cannot_be_written_to_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, kind: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file" / "gone")
    paths = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "sub",
        "a link to nothing": tmp_path / "link",
        "not for us": Path("/proc/isotron"),
    }
    other = [] if option == "--run-dir" else ["--run-dir", str(tmp_path / "fine")]
    other += ["--local-save-interval", "1"] if option == "--local-save" else []
    assert main([*TINY, *other, option, str(paths[kind])]) == 2
    said = capsys.readouterr()
    assert f"asked:  {option} {paths[kind]}" in said.err
    assert "iteration" not in said.out
    assert (tmp_path / "file").read_text() == "x"


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SECONDS_TO_END", 0.3)
    both = {"--run-dir": tmp_path / "run", "--save": tmp_path / "run"}
    with ExitStack() as first:
        claim(SingleRank(), both, first)
        with ExitStack() as second, pytest.raises(Refused, match="another run is writing there"):
            claim(SingleRank(), {"--save": tmp_path / "run"}, second)
    with ExitStack() as third:
        claim(SingleRank(), both, third)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    code = (
        "import sys, time; from contextlib import ExitStack; from pathlib import Path\n"
        "from isotron.core.checkpoint.ranks import SingleRank; from isotron.train.places import claim\n"
        "with ExitStack() as s: claim(SingleRank(), {'--save': Path(sys.argv[1])}, s); print(flush=True); time.sleep(1)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with ExitStack() as stack:
            claim(SingleRank(), {"--save": tmp_path}, stack)


def test_more_processes_than_the_machine_can_hold_are_refused() -> None:
    with pytest.raises(Refused, match="at most"):
        run_local("isotron.train.main:main", 10_000_000)


def test_what_the_system_says_about_a_file_is_three_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.jsonl").write_text('{"text": "1 2 3"}\n')
    words = shlex.split("preprocess --tokenizer-type NullTokenizer --vocab-size 10 --output-prefix")
    assert main([*words, f"{tmp_path}/file.jsonl/out", "--input", f"{tmp_path}/file.jsonl"]) == 1
    assert "asked:  the file " in capsys.readouterr().err


def test_full_disks_are_about_files_and_lost_peers_are_not() -> None:
    full = refuse_file(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert full is not None and "No space left" in str(full)
    assert refuse_file(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")) is None


@pytest.mark.parametrize(
    ("after", "world"),
    [
        ("| head -1", ["--tp", "2"]),
        (">&-", []),
        ("<&- >&- 2>&-", ["--tp", "2"]),
        pytest.param("| head -1", [], marks=pytest.mark.slow),
        pytest.param(">&-", ["--tp", "2"], marks=pytest.mark.slow),
        pytest.param("<&- >&- 2>&-", [], marks=pytest.mark.slow),
    ],
)
def test_a_run_outlives_whoever_reads_its_lines(tmp_path: Path, after: str, world: list[str]) -> None:
    words = [sys.executable, "-m", "isotron", *TINY, "--train-iters", "30", *world, "--run-dir", str(tmp_path)]
    script = f"set -o pipefail; {shlex.join(words)} {after}; echo $? > {shlex.quote(str(tmp_path / 'code'))}"
    subprocess.run(["bash", "-c", script], timeout=120, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    assert (tmp_path / "code").read_text() == "0\n"
    assert (tmp_path / "latest").read_text().strip() == "step_00000030"


def test_a_disk_that_no_save_would_fit_on_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotron.train.main.free_bytes", lambda path: SPARE_BYTES)
    assert main([*TINY, "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "are free" in said.err and "iteration" not in said.out


def test_a_damaged_step_is_passed_over_and_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = str(tmp_path)
    assert main([*TINY, "--save", home, "--save-interval", "1"]) == 0
    os.truncate(tmp_path / "step_00000002" / "rank_00000.safetensors", 100)
    capsys.readouterr()
    assert main([*TINY, "--save", home, "--load", home, "--print-config"]) == 0
    assert capsys.readouterr().err.count("is not complete, looking for another") == 1
    assert main([*TINY, "--save", home, "--load", home]) == 0
    said = "".join(capsys.readouterr())
    assert said.count("is not complete, looking for another") == said.count("newest complete checkpoint") == 1
    assert "at step 1," in said


@pytest.mark.parametrize("end", [137, 75, KeyboardInterrupt])
def test_a_run_that_is_cut_off_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, end: int | type[BaseException]
) -> None:
    """And the advice is one that can be followed."""

    def cut_off(*_: object) -> int:
        if isinstance(end, int):
            return end
        raise end

    save = tmp_path / "run"
    code = end if isinstance(end, int) else 130
    with monkeypatch.context() as patch:
        patch.setattr("isotron.commands.train.run_local", cut_off)
        assert main([*TINY, "--save", str(save)]) == code
        assert f"isotron: nothing was saved: {save} holds no checkpoint\n" in capsys.readouterr().err
    assert main([*TINY, "--save", str(save), "--save-interval", "1"]) == 0
    (save / "step_00000002" / "rank_00000.safetensors").write_bytes(b"cut")
    with monkeypatch.context() as patch:
        patch.setattr("isotron.commands.train.run_local", cut_off)
        assert main([*TINY, "--load", str(save), "--save", str(save)]) == code
    said = f"isotron: the last checkpoint is {save}/step_00000001; the same command with "
    assert said in (err := capsys.readouterr().err)
    assert main([*TINY, *shlex.split(err.partition(said)[2].partition(" goes on")[0])]) == 0
    assert "resumed from" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--save", "--run-dir"])
@pytest.mark.parametrize("begins", ["anew", "with another run", "with weights"])
def test_a_run_does_not_save_over_another_ones_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, begins: str
) -> None:
    """Both ways out that are named are taken; nothing of the earlier run is gone."""
    earlier, other = tmp_path / "run", tmp_path / "other"
    few = ["--save-interval", "1", "--keep-last", "3"]
    assert main([*TINY, *few, option, str(earlier)]) == 0
    assert main([*TINY, "--save", str(other), "--train-iters", "1"]) == 0
    more = {
        "anew": [],
        "with another run": ["--load", str(other)],
        "with weights": ["--finetune", "--load", str(other)],
    }
    words = [*TINY, *more[begins], "--keep-last", "1"]
    there = {file: file.stat().st_mtime_ns for file in earlier.rglob("*")}
    capsys.readouterr()
    assert main([*words, option, str(earlier)]) == 2
    asked, case, fix = capsys.readouterr().err.splitlines()[-3:]
    assert asked == f"asked:  {option} {earlier}" + (f" --load {other}" if more[begins] else "")
    assert "it holds step_00000002 and 1 more of an earlier run" in case
    assert there == {file: file.stat().st_mtime_ns for file in earlier.rglob("*")}
    goes_on, _, elsewhere = fix.removeprefix("try:").strip().partition(", to go on with that run, or ")
    assert main([*words, *elsewhere.split()]) == 0 and elsewhere == f"{option} {earlier}-2"
    goes_on = goes_on.removeprefix("isotron train ")
    assert main([*TINY, *few, *goes_on.split(), "--train-iters", "3"]) == 0
    assert {"step_00000001", "step_00000002", "step_00000003"} <= {path.name for path in earlier.iterdir()}
    back = ["--load", str(earlier / "step_00000001"), option, str(earlier)]  # from one of its own steps
    there = {file: file.stat().st_mtime_ns for file in earlier.rglob("*")}
    assert main([*TINY, *few, "--finetune", *back]) == 2  # but not with its weights
    assert there == {file: file.stat().st_mtime_ns for file in earlier.rglob("*")}
    assert main([*TINY, *few, *back]) == 0


@pytest.mark.parametrize("names", ["the run", "the step"])
def test_weights_in_a_directory_are_not_saved_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    """A run that begins with them saves elsewhere; there is none to go on with, and the advice says only that."""
    home = tmp_path / "a run"
    meta = {"config": {"model": {"vocab_size": 20}}, "weights_only": True}
    step = save_checkpoint(home, 0, [one("w", values((8, 3)))], meta, SingleRank())
    assert main([*TINY, "--load", str(home if names == "the run" else step), "--save", str(home)]) == 2
    assert f"\ntry:    --save '{home}-2'\n" in capsys.readouterr().err


def test_a_run_that_is_refused_midway_says_what_it_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = ["--train-iters", "3", "--save-interval", "1", "--inject", "nan@3:0", "--on-nan", "stop"]
    assert main([*TINY, *faulty, "--save", str(tmp_path)]) == 1
    assert f"isotron: the last checkpoint is {tmp_path}/step_00000002; " in capsys.readouterr().err


@pytest.mark.parametrize(("finetune", "start"), [(True, "isotron train"), (False, "the same command with")])
def test_the_advice_of_a_run_that_is_cut_off_can_be_typed(tmp_path: Path, finetune: bool, start: str) -> None:
    """Not with the weights again after a fine-tuning; a path of two words is one."""
    save = str(tmp_path / "two words")
    save_checkpoint(save, 1, [one("w", values((8, 3)))], {}, SingleRank())
    said = left_behind(CheckpointConfig(save=save, finetune=finetune))
    assert said.endswith(f"; {start} --load '{save}' --save '{save}' goes on from there")
