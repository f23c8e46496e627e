"""A model that is too large for the memory is refused before anything starts, with the planner's bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from isotron import cli
from isotron.config.check import check, finish
from isotron.config.schema import RunConfig, changed
from isotron.core.host import available_memory
from isotron.core.models.llama_config import LlamaConfig
from isotron.planner.fit import memory_problem, out_of_memory, rank_bytes
from isotron.planner.job import Job
from isotron.planner.memory import plan_memory
from isotron.planner.remedies import _largest_below


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
    assert "no single one would do" in memory_problem(cfg, 1.0, True, 4).fix  # type: ignore[union-attr]


ABSURD: tuple[tuple[dict[str, int], str, str], ...] = (
    ({"hidden_size": 10**9, "num_attention_heads": 1000}, "--hidden-size", "layers.0.mlp.gate_up.weight of 5,3"),
    ({"vocab_size": 10**9}, "--vocab-size", "embed.weight of 1,000,000,000 x 64, has 256 GB"),
    ({"ffn_hidden_size": 10**9}, "--ffn-hidden-size", "layers.0.mlp.gate_up.weight"),
    ({"seq_length": 10**8}, "--seq-length", "GB are free"),
    ({"num_layers": 500, "hidden_size": 2048}, "--num-layers", "activations"),
    ({"num_layers": 512, "hidden_size": 2048, "pp": 2, "vpp": 4, "global_batch_size": 8}, "--num-layers", "GB are"),
)


@pytest.mark.parametrize(("leaves", "option", "cause"), ABSURD)
def test_of_absurd_sizes_the_advice_is_one_that_fits(leaves: dict[str, int], option: str, cause: str) -> None:
    cfg = config(**leaves)
    assert not check(cfg)
    problem = memory_problem(cfg, 2e10, True, cfg.layout.world)
    assert problem is not None and cause in problem.case and "or more machines: isotron plan" in problem.fix
    assert option in problem.fix
    for fix in problem.fix.split("; or ")[:-1]:
        words = fix.split()
        given = {k[2:].replace("-", "_"): int(v) for k, v in zip(words[::2], words[1::2], strict=True)}
        less = config(**{**leaves, **given})
        assert memory_problem(less, 2e10, True, less.layout.world) is None and not check(less)


def test_a_vocabulary_that_a_tokenizer_has_is_not_made_smaller(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    cfg = config(vocab_size=10**9, tokenizer_model=str(file))
    assert "--vocab-size" not in memory_problem(cfg, 2e10, True, 1).fix  # type: ignore[union-attr]


def test_a_microbatch_below_is_found_among_any_number() -> None:
    for own, micro in ((10**12, 10**9), (360, 20), (17, 17), (7, 1)):
        job = replace(Job.of(config()), global_batch=own, micro_batch=micro)
        below = _largest_below(job)
        assert own % below == 0 and (below < micro or micro == 1)
        assert own > 10**6 or below == max([m for m in range(1, micro) if own % m == 0], default=1)


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
