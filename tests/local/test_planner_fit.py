"""A model that is too large for the memory is refused before anything starts, with the planner's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotron import cli
from isotron.config.check import finish
from isotron.config.schema import RunConfig, changed
from isotron.core.host import available_memory
from isotron.core.models.llama_config import LlamaConfig
from isotron.planner.fit import memory_problem, out_of_memory, rank_bytes
from isotron.planner.job import Job
from isotron.planner.memory import plan_memory


def config(**leaves: object) -> RunConfig:
    usual = {"device": "cpu", "seq_length": 16, "train_iters": 1, "mock_data": True}
    return finish(changed(RunConfig(model=LlamaConfig(4, 64, 4, vocab_size=100)), **{**usual, **leaves}))


def test_what_fits_and_what_does_not() -> None:
    cfg = config(dp=2, tp=2)
    need = sum(rank_bytes(cfg)) * 4
    assert rank_bytes(cfg) == [b.total for b in plan_memory(Job.of(cfg))]
    assert memory_problem(cfg, need, True, 4) is None and memory_problem(cfg, need / 4, False, 4) is None
    problem = memory_problem(cfg, need - 1, True, 4)
    assert problem is not None and "4 process(es) on this machine need" in problem.case and "--tp 2" in problem.asked
    assert all(kind in problem.case for kind in ("weights", "gradients", "moments", "activations"))
    assert "--num-layers 1" in memory_problem(cfg, 1.0, True, 4).fix  # type: ignore[union-attr]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_three_changes_that_fit_are_named(on_cpu: bool) -> None:
    cfg = config(dp=2, zero=0, micro_batch_size=8, global_batch_size=16, seq_length=128)
    need = max(rank_bytes(cfg))
    problem = memory_problem(cfg, (2 if on_cpu else 1) * 0.75 * need, on_cpu, 2)
    assert problem is not None
    fixes = problem.fix.split("; or ")
    assert len(fixes) == 3 and all(fix.startswith("--") for fix in fixes)
    for fix in fixes:  # each is a command that then fits
        words = fix.split(" (")[0].split()
        leaves = {k.removeprefix("--").replace("-", "_"): v for k, v in zip(words[::2], words[1::2], strict=True)}
        changed_ = config(**{**{"dp": 2, "zero": 0, "micro_batch_size": 8, "global_batch_size": 16, "seq_length": 128},
                             **{k: int(v) if v.isdigit() else v for k, v in leaves.items()}})  # fmt: skip
        assert memory_problem(changed_, (2 if on_cpu else 1) * 0.75 * need, on_cpu, 2) is None


def test_copies_for_saves_in_the_background_count() -> None:
    plain, copies = config(dp=2), config(dp=2, async_save=True)
    (bytes_,) = plan_memory(Job.of(plain))
    assert rank_bytes(copies)[0] - rank_bytes(plain)[0] == bytes_.weights / 2 + bytes_.masters + bytes_.moments


def test_the_command_refuses_at_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "train --mock-data --num-layers 96 --hidden-size 32768 --num-attention-heads 64 --vocab-size 50000"
    assert cli.main([*words.split(), "--train-iters", "1", "--device", "cpu", "--save", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["asked", "but", "try"]
    assert "GB are free" in lines[-2] and not (tmp_path / "run").exists()


def test_memory_that_runs_out_on_the_way_is_no_traceback() -> None:
    cfg = config()
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes\nx")):
        refused = out_of_memory(cfg, error)
        assert refused is not None and refused.exit_code == 1 and len(str(refused).splitlines()) == 3
    assert "can't allocate memory: you tried 9 bytes" in str(refused) and "activations" in str(refused)
    large = out_of_memory(config(micro_batch_size=64, seq_length=512), MemoryError())
    assert large is not None and len(large.problems[0].fix.split("; or ")) == 3 and " GB)" in large.problems[0].fix
    assert out_of_memory(cfg, RuntimeError("shapes differ")) is None


def test_the_system_is_asked(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none") is None
    (tmp_path / "info").write_text("MemTotal: 9 kB\nMemAvailable:   2 kB\n")
    assert available_memory(tmp_path / "info") == 2048.0
    (tmp_path / "info").write_text("MemTotal: 9 kB\n")
    assert available_memory(tmp_path / "info") is None
