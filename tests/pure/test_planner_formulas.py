"""Published numbers that follow from formulas: parameters, state, activations, bubbles, FLOPs definitions."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

from isotron.config.schema import PRESETS
from isotron.core.parallel.plan import Layout
from isotron.planner.definitions import DEFINITIONS, of_row
from isotron.planner.hardware import GIB
from isotron.planner.job import Job
from isotron.planner.live import gathered_elements
from isotron.planner.memory import activation_peaks, states
from isotron.planner.parameters import count_parameters, rank_stages, stage_names
from isotron.planner.published import cases
from isotron.planner.reference import first_stage, layer_activations, state_per_parameter
from isotron.planner.shapes import MILESTONES
from isotron.planner.work import step_flops
from isotron.train import flops


@pytest.mark.parametrize(
    ("name", "billions"),
    [("megatron-8.3b", 8.317), ("gpt3-175b", 174.6), ("mt-nlg-530b", 529.6), ("gpt-1t", 1008.0), ("llama3-8b", 8.03),
     ("llama3-70b", 70.55), ("llama3-405b", 405.85), ("mixtral-8x7b", 46.7), ("deepseek-v3", 671.03)],
)  # fmt: skip
def test_milestones_have_the_published_parameters(name: str, billions: float) -> None:
    assert count_parameters(MILESTONES[name][0]) / 1e9 == pytest.approx(billions, rel=0.002)


def test_state_of_a_middle_stage() -> None:
    # GPT-3 over TP 8 x PP 8 at 18 bytes: 45.5625 GiB in the matrices alone (Korthikanti et al., figure 1)
    config = MILESTONES["gpt3-175b"][0]
    assert 12 * config.hidden_size**2 * 96 / 64 * state_per_parameter("bfloat16", 1) / GIB == 45.5625
    job = Job(config, Layout(8, 8, 1, zero=0), 2048, 1, 64)
    assert states(job, rank_stages(config, job.layout, 3)).states / GIB == pytest.approx(45.58, abs=0.005)
    assert states(job, rank_stages(config, job.layout, 0)).states / GIB == pytest.approx(47.3, abs=0.05)


def test_seven_billion_weights_on_eight_ranks() -> None:
    """bfloat16, ZeRO-3: an eighth of all weights each, exactly, and a block for a moment; no rank sees half of them."""
    config, layout = PRESETS["llama2-7b"], Layout(dp=8, zero=3)
    (part,) = rank_stages(config, layout, 0)
    job, count = Job(config, layout, 4096, 1, 8), count_parameters(config)
    held = [states(job, [part], rank).weights for rank in range(8)]
    assert sum(held) == 2 * count and 2 * count / 1e9 == pytest.approx(13.48, abs=0.01)
    units = gathered_elements(part)
    assert max(held) - min(held) <= 2 * len(part.spans) * 11008  # runs end where rows do
    assert max(held) + 2 * max(units.values()) < 2.2e9 < 2 * count / 6
    # the optimizer: gradients, masters and two moments in float32, cut the same way
    assert sum(states(job, [part], rank).states for rank in range(8)) == (2 + 4 + 4 + 8) * count


# name: layers, width, heads, TP, PP, VPP, microbatch, GiB without recompute, GiB selective + sequence parallel
FIGURE_1 = {
    "22B": (48, 6144, 64, 8, 1, 1, 4, 59.3, 9.6),
    "175B": (96, 12288, 96, 8, 8, 3, 1, 66.8, 12.4),
    "530B": (105, 20480, 128, 8, 35, 3, 1, 114.0, 23.1),
    "1T": (128, 25600, 160, 8, 64, 1, 1, 131.3, 26.6),
}


@pytest.mark.parametrize("name", FIGURE_1)
def test_activations_of_figure_1(name: str) -> None:
    layers, h, a, t, p, v, b, plain, lean = FIGURE_1[name]
    one = layer_activations(2048, b, h, a, t)
    few = layer_activations(2048, b, h, a, t, sequence_parallel=True, recompute="selective")
    ends = 0.0 if p > 1 else 4 * 2048 * b * h * (1 + 51200 / h) / t + 8 * 2048 * b * p + 2048 * b * h * p / t
    assert (first_stage(one, layers, p, v) + ends) / GIB == pytest.approx(plain, rel=0.03)
    assert (first_stage(few, layers, p, v) + ends) / GIB == pytest.approx(lean, rel=0.03)


@pytest.mark.parametrize(
    ("h", "a", "relative"),
    [(6144, 64, (66.8, 49.4, 16.2, 7.6)), (12288, 96, (62.0, 56.5, 18.5, 8.7)), (20480, 128, (58.3, 62.0, 20.3, 9.4))],
)
def test_relative_activations_of_figure_7(h: int, a: int, relative: tuple[float, ...]) -> None:
    base = layer_activations(2048, 1, h, a, 8)
    ways = ((True, "none"), (False, "selective"), (True, "selective"), (False, "full"))
    for (sp, recompute), percent in zip(ways, relative, strict=True):
        found = 100 * layer_activations(2048, 1, h, a, 8, sp, recompute) / base
        assert found == pytest.approx(percent, abs=0.15)


@pytest.mark.parametrize(
    ("schedule", "vpp", "kept"),
    [("1f1b", 1, 4.0), ("gpipe", 1, 12.0), ("zb-h1", 1, 4.0), ("zbv", 2, 4.0), ("interleaved", 2, 4 * (1 + 3 / 8))],
)
def test_kept_microbatches_follow_the_table(schedule: str, vpp: int, kept: float) -> None:
    config = replace(PRESETS["llama-tiny"], num_layers=64, vocab_size=128, max_position_embeddings=64)
    job = Job(config, Layout(1, 4, 1, vpp, schedule=schedule), 64, 1, 12)
    every = [rank_stages(config, job.layout, r) for r in range(4)]
    peak = activation_peaks(job, job.table(), every)[0]
    one = activation_peaks(replace(job, global_batch=1), replace(job, global_batch=1).table(), every)[0]
    assert peak / one == pytest.approx(kept, rel=0.03)


def test_keeping_some_microbatches_whole() -> None:
    config = replace(PRESETS["llama-tiny"], num_layers=8, vocab_size=128, max_position_embeddings=64)
    peaks = []
    for keep in (0, 1, 2, 4):
        job = Job(config, Layout(1, 4, 1, recompute="full", recompute_keep=keep), 64, 1, 12)
        every = [rank_stages(config, job.layout, r) for r in range(4)]
        peaks.append(activation_peaks(job, job.table(), every)[0])
    none = Job(config, Layout(1, 4, 1), 64, 1, 12)
    assert peaks == sorted(set(peaks))
    assert peaks[-1] == activation_peaks(none, none.table(), [rank_stages(config, none.layout, r) for r in range(4)])[0]


def test_blocks_with_the_same_rules_are_looked_up_once() -> None:
    """With what each block's own look-up finds."""
    for config in (replace(c, vocab_size=1000) for n, c in PRESETS.items() if "tiny" in n):
        once, each = config.layout(1000), config.layout(1000)
        each.__dict__["alike"] = False
        blocks = range(min(config.num_layers, 5))
        names = list(stage_names(config, once, blocks, True, True))
        assert names == list(stage_names(config, each, blocks, True, True))
        assert [once.rule(n) for n in names] == [each.rule(n) for n in names]
        if not once.alike:
            assert any("layers." in r.pattern and not r.pattern.startswith("layers.*.") for r in once.rules)


def test_flops_are_those_that_a_run_reports() -> None:
    for name, config in PRESETS.items():
        config = replace(config, vocab_size=config.vocab_size or 1000, max_position_embeddings=2048)
        job = Job(config, Layout(dp=1), 2048, 1, 4)
        found = step_flops(job)
        assert isclose(found.model, flops.step_flops(config, 8192, 2048), rel_tol=1e-12), name
        assert isclose(found.full, flops.step_flops(config, 8192, 2048, causal=False), rel_tol=1e-12), name


def test_published_utilisation_follows_from_published_times() -> None:
    worst: dict[str, float] = {}
    for c in cases():
        name = of_row(c.row)
        if name and c.row["mfu"] and c.row["step_time_s"]:
            peak = c.device.peak("bfloat16" if c.form == "16bit" else "float8")
            rebuilt = DEFINITIONS[name](c.job) / c.seconds / c.job.world / peak
            worst[name] = max(worst.get(name, 0.0), abs(rebuilt / float(c.row["mfu"]) - 1))
    assert set(worst) >= {"korthikanti-mfu", "dgxc-gpt", "dgxc-llama", "dgxc-nemotron"}
    assert worst["korthikanti-mfu"] < 0.005 and worst["dgxc-gpt"] < 0.005 and max(worst.values()) < 0.03
