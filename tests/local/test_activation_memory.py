"""Ways to keep fewer activations: host memory, chunks of an MLP, a budget of bytes. The same numbers, fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from isotron import cli
from isotron.config.check import finish
from isotron.config.schema import RunConfig, changed
from isotron.core.errors import Refused
from isotron.core.mapped import Disk
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.olmo2_config import Olmo2Config
from isotron.core.parallel.host import HostActivations
from isotron.core.parallel.plan import Layout
from isotron.planner.activations import stage_bytes
from isotron.planner.budget import GIB, choices, choose, peak_bytes, within_budget
from isotron.train.dryrun.rank import dry
from isotron.train.verify import Case, measure
from tests.ranks.bodies import build, steps_of
from tests.ranks.test_planner_activations import job_of, saved

MODEL = LlamaConfig(4, 32, 4, 2, 0, 48, 131, 16)
PLAIN = Case(MODEL, Layout(dp=1, make_vocab_size_divisible_by=8), 16, 2, 4, steps=2, dtype="float32")


pytestmark = pytest.mark.usefixtures("one_thread")


def with_layout(case: Case, **leaves: Any) -> Case:
    return replace(case, layout=replace(case.layout, **leaves))


@pytest.mark.parametrize("mode", [{}, {"recompute": "selective"}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("blocks", [0, 2])
def test_host_memory_and_files_change_no_bit(mode: dict[str, Any], blocks: int, tmp_path: Path) -> None:
    here = measure(with_layout(PLAIN, **mode))
    for files in ("", str(tmp_path)):
        offloading = {"cpu_offloading": True, "cpu_offloading_num_layers": blocks, "offload_dir": files}
        there = measure(with_layout(PLAIN, **mode, **offloading))
        assert there.losses == here.losses and there.norms == here.norms
        assert all(torch.equal(g, there.gradients[name]) for name, g in here.gradients.items())
    assert not list(tmp_path.iterdir())  # files have no names


def test_files_of_activations_serve_again(tmp_path: Path) -> None:
    model = build(with_layout(PLAIN, cpu_offloading=True, offload_dir=str(tmp_path)))
    made: list[int] = []
    with patch.object(Disk, "__init__", lambda self, d, n, init=Disk.__init__: (made.append(n), init(self, d, n))[1]):
        steps_of(model, replace(PLAIN, steps=1))
        once = len(made)
        steps_of(model, PLAIN)
    assert 0 < once == len(made)


def test_what_is_in_host_memory_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_layout(replace(PLAIN, steps=1, global_batch=2), cpu_offloading=True)
    model = build(case)
    (stage,) = model.stages.values()
    seen: list[list[int]] = []

    def look(*_: Any) -> None:
        host = stage.module.offloading
        assert isinstance(host, HostActivations) and host.last is not None
        units, unit = [], host.last
        while unit is not None:
            units.append(sum(kept.source is not None for kept in unit.alive()))
            unit = unit.before
        seen.append(units)

    stage.module.norm.register_forward_hook(look)
    steps_of(model, case)
    (units,) = seen
    assert len(units) == 4 and units[0] > 0 and units[2:] == [0, 0]  # the last two blocks are on their way


def test_views_of_one_tensor_travel_once() -> None:
    case = with_layout(replace(PLAIN, steps=1, global_batch=2), cpu_offloading=True)
    model = build(case)
    (stage,) = model.stages.values()
    sizes: list[int] = []

    def look(*_: Any) -> None:
        sizes.append(sum(kept.host.numel() for kept in stage.module.offloading.last.alive()))

    stage.module.norm.register_forward_hook(look)
    steps_of(model, case)
    job = replace(
        job_of("llama-tiny", case.layout, "float32", 0.0), config=MODEL, seq=16, micro_batch=2, global_batch=2
    )
    one = stage_bytes(job.with_layout(cpu_offloading=False), 1, False, False)
    angles = 2 * 16 * 8 * 4 * 2
    assert one - angles <= sizes[0] <= one


@pytest.mark.parametrize("model", [MODEL, GPTConfig(2, 32, 4, vocab_size=131, max_position_embeddings=16)])
@pytest.mark.parametrize("mode", [{}, {"recompute": "full"}], ids=str)
def test_chunks_of_an_mlp(model: Any, mode: dict[str, Any]) -> None:
    whole = replace(PLAIN, model=model, dtype="float64")
    a, b = measure(whole), measure(with_layout(whole, mlp_chunks=3, **mode))  # 16 slots: 6, 6 and 4
    assert all(torch.allclose(g, b.gradients[n], rtol=1e-9, atol=1e-12) for n, g in a.gradients.items())


def test_chunks_keep_the_input_only() -> None:
    job = job_of("llama-tiny", Layout(dp=1, mlp_chunks=4, make_vocab_size_divisible_by=1), "bfloat16", 0.0)
    ((_, found),) = saved(job)
    planned = stage_bytes(job, 4, True, True)
    assert planned == pytest.approx(found, rel=0.005)
    assert planned < 0.7 * stage_bytes(job.with_layout(mlp_chunks=1), 4, True, True)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_a_budget_is_kept_at_the_least_work(name: str) -> None:
    job = job_of(name, Layout(dp=1, make_vocab_size_divisible_by=1), "bfloat16", 0.1 if name == "gpt-tiny" else 0.0)
    everything = peak_bytes(job)
    least = min(c.peak for c in choices(job))
    assert choose(job, everything).leaves == {"recompute": "none"}
    works = []
    for share in (1.0, 0.7, 0.4, 0.0):
        budget = least + share * (everything - least)
        chosen = choose(job, budget)
        works.append(chosen.work)
        ((_, measured),) = saved(job.with_layout(**chosen.leaves))
        assert measured <= budget * 1.005 and chosen.peak <= budget
    assert works == sorted(works) and works[0] == 0 < works[-1]
    with pytest.raises(Refused, match="everything computed again"):
        choose(job, least * 0.99)


def test_the_config_says_what_was_chosen() -> None:
    run = changed(
        RunConfig(), vocab_size=512, dp=1, global_batch_size=1, dtype="bfloat16", max_position_embeddings=1024
    )
    assert within_budget(run) == (run, [])
    asked = changed(run, activation_budget_gib=0.2)
    found, (line,) = within_budget(asked)
    assert found.layout.recompute != "none" and not found.layout.activation_budget_gib
    assert line.startswith("--activation-budget-gib 0.2: --recompute ")
    from isotron.planner.job import Job

    assert peak_bytes(Job.of(found)) <= 0.2 * GIB < peak_bytes(Job.of(run))


def test_each_mode_keeps_less_than_the_one_before() -> None:
    """Measured of a GPT-3-shaped layer, 16 times narrower, with explicit probabilities."""
    config = GPTConfig(2, 768, 6, vocab_size=512, max_position_embeddings=512)
    job = replace(job_of("gpt-tiny", Layout(dp=1), "bfloat16", 0.1), config=replace(config, hidden_dropout=0.1,
                  attention_dropout=0.1), seq=64, micro_batch=2)  # fmt: skip
    kept = {mode: saved(job.with_layout(recompute=mode))[0][1] for mode in ("none", "selective", "full")}
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_eight_times_the_sequence_in_the_same_memory(mode: str) -> None:
    job = job_of("llama-tiny", Layout(dp=1, recompute=mode), "bfloat16", 0.0)
    long = replace(job.with_layout(cp=8), seq=8 * job.seq)
    assert peak_bytes(long) == peak_bytes(job)


def test_the_same_memory_in_a_ring_of_any_size() -> None:
    """What is on its way in a ring does not grow with its ranks: counted call by call, eight times the sequence on
    eight ranks takes what two on two take, and little more than one alone.
    """
    model = replace(MODEL, num_layers=2, hidden_size=128, ffn_hidden_size=256, vocab_size=128,
                    max_position_embeddings=8192)  # fmt: skip
    found = {}
    for cp in (1, 2, 8):
        leaves = {"dp": 1, "cp": cp, "zero": 0, "seq_length": 1024 * cp, "make_vocab_size_divisible_by": 8}
        usual = {"global_batch_size": 1, "micro_batch_size": 1, "train_iters": 1, "dtype": "bfloat16", "device": "cpu"}
        found[cp] = dry(finish(changed(RunConfig(model=model), **leaves, **usual)), 0).activations
    assert found[2] == found[8] < 1.15 * found[1]


def test_the_plan_chooses_too(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--preset", "llama-tiny", "--seq-length", "512", "--dp", "1", "--activation-budget-gib", "0.002"]
    assert cli.main(plan) == 0
    assert "--activation-budget-gib 0.002: --recompute " in capsys.readouterr().out
    assert cli.main(["plan", "--preset", "llama-tiny", "--gpus", "2", "--activation-budget-gib", "1"]) == 2
    assert "a search chooses" in capsys.readouterr().err


def flops_of(model: Any, **leaves: Any) -> int:
    """Of a step of one microbatch, attention aside."""
    built = build(with_layout(replace(PLAIN, model=model, steps=1, global_batch=2), **leaves))
    with FlopCounterMode(display=False) as counter:
        steps_of(built, with_layout(replace(PLAIN, model=model, steps=1, global_batch=2), **leaves))
    return counter.get_total_flops()


@pytest.mark.parametrize("unit", [1, 2])
def test_a_second_forward_leaves_out_what_nothing_reads(unit: int) -> None:
    """The last product of a recomputed unit's last MLP, a quarter of a block's work; a norm behind it would read it."""
    d, f, kv, tokens = 32, 48, 16, 32
    attention, inside, last = d * (d + 2 * kv) + d * d, 2 * d * f, f * d
    extra = flops_of(MODEL, recompute="full", recompute_num_layers=unit) - flops_of(MODEL)
    assert extra == 2 * tokens * (4 * (attention + inside + last) - 4 // unit * last)
    alone = flops_of(MODEL, recompute="selective", recompute_modules=("mlp",)) - flops_of(MODEL)
    assert alone == 2 * tokens * 4 * inside
    after = Olmo2Config(4, 32, 4, 4, 0, 48, 131, 16)
    whole = flops_of(after, recompute="full") - flops_of(after)
    assert whole == 2 * tokens * 4 * (4 * d * d + inside + last)
