"""Searching layouts, advice, reports, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isotron import cli
from isotron.commands.plan import OWN, run
from isotron.commands.train import advice
from isotron.config.schema import PRESETS, RunConfig, changed
from isotron.core.errors import Refused
from isotron.core.parallel.plan import Layout
from isotron.planner.advice import warnings
from isotron.planner.amounts import amount, in_words
from isotron.planner.block_time import Place
from isotron.planner.efficiency import STACKS, Fractions, Stack, stack_for
from isotron.planner.hardware import GIB, find, known
from isotron.planner.job import Job
from isotron.planner.memory import plan_memory
from isotron.planner.remedies import remedies
from isotron.planner.report import search_facts, search_lines
from isotron.planner.search import evaluate, frontier, layouts, quick_memory, search, why
from isotron.planner.shapes import MILESTONES
from isotron.planner.time import kinds_elements, rank_seconds, step_seconds, units

H100 = Place(find("h100"), stack_for("h100"))


def llama(layout: Layout, gbs: int = 64, micro: int = 1, seq: int = 4096) -> Job:
    config = replace(PRESETS["llama3-8b"], max_position_embeddings=seq)
    return Job(config, layout, seq, micro, gbs)


# ---- time and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zbv", 2)]
)
def test_the_closed_form_is_near_the_table(schedule: str, vpp: int) -> None:
    job = llama(Layout(2, 4, 2, vpp, True, 1, schedule))
    table, formula = step_seconds(job, H100, exact=True), step_seconds(job, H100)
    assert formula.total == pytest.approx(table.total, rel=0.06)
    assert table.bubble > 0 or schedule == "zbv"


def test_microbatches_left_out_of_a_simulation_change_nothing() -> None:
    job = llama(Layout(2, 4, 1, 1, True, 0), gbs=64)
    assert job.simulated < job.microbatches
    whole = step_seconds(job, H100, exact=True).total
    short = step_seconds(replace(job, global_batch=16), H100, exact=True)
    per_microbatch = (whole - short.total) / 48
    longer = step_seconds(replace(job, global_batch=65), H100, exact=True).total
    assert longer - whole == pytest.approx(per_microbatch, rel=1e-6)


def test_quick_memory_is_near_the_exact() -> None:
    for layout in (
        Layout(2, 1, 8, 1, True, 1),
        Layout(4, 2, 2, 1, True, 1),
        Layout(1, 4, 4, 2, False, 1, "interleaved"),
        Layout(1, 1, 64, 1, False, 3, recompute="full"),
        Layout(4, 1, 16, 1, True, 2),
        Layout(1, 4, 16, 1, False, 2),
        Layout(1, 8, 4, 1, False, 1, "zb-h1", recompute="full"),
    ):
        job = llama(layout)
        assert quick_memory(job, 0.0) == pytest.approx(max(b.total for b in plan_memory(job)), rel=0.08)


def test_what_is_put_first_fits_by_its_table() -> None:
    """Of the layouts that closed forms put first here, the first six are too large by their tables."""
    limit = 0.94 * H100.device.memory
    found = search(replace(llama(Layout(dp=1), 1024, seq=8192), config=PRESETS["llama3-70b"]), 64, H100, limit, 8)
    assert found.best[0].exact and found.best[0].memory <= limit
    for c in found.best[1:]:
        assert c.exact or c.time >= found.best[0].time


def test_every_device_and_stack_has_what_it_needs() -> None:
    for device in known().values():
        assert device.memory > GIB and device.peaks and device.link(2, 1) == device.inner
    for name in STACKS:
        assert 0 < stack_for("h100", name).of("h100", "16bit").matmul <= 1
    with pytest.raises(Refused, match="--gpu h100"):
        find("h10")
    with pytest.raises(Refused, match="the stacks are"):
        stack_for("h100", "none")


@pytest.mark.parametrize("name", MILESTONES)
def test_a_dry_run_of_every_milestone(name: str) -> None:
    config, devices, gpu, seq, gbs, _ = MILESTONES[name]
    job = Job(config, Layout(8, 8, devices // 64 or 1, 1, True, 1), seq, 1, max(gbs, devices // 64))
    job = replace(job, global_batch=job.dp * 8)
    place = Place(find(gpu), stack_for(gpu))
    assert step_seconds(job, place).total > 0 and max(b.total for b in plan_memory(job)) > GIB


# ---- search ----------------------------------------------------------------------------------------------------------


def test_every_layout_is_legal_and_uses_all_devices() -> None:
    found = list(layouts(llama(Layout(dp=1)), 16, 8))
    assert len({(j.layout, j.micro_batch) for j in found}) == len(found) > 50
    for j in found:
        assert j.world == 16 and j.global_batch % (j.micro_batch * j.dp) == 0
        assert j.config.num_attention_heads % j.layout.tp == 0 and j.config.num_layers >= j.layout.stages


def test_the_best_layout_fits_and_none_on_the_frontier_is_beaten() -> None:
    limit = 70 * GIB
    found = search(llama(Layout(dp=1)), 16, H100, limit, 5)
    assert found.best and all(c.memory <= limit and c.counted for c in found.best)
    for c in found.best:
        assert c.memory == max(b.total for b in plan_memory(c.job, H100.device.context))
    assert [c.time for c in found.best] == sorted(c.time for c in found.best)
    for a in found.frontier:
        assert not any(b.time < a.time and b.memory < a.memory for b in found.frontier)
    assert frontier(found.frontier) == found.frontier
    said = search_lines(search_facts(found), limit)
    assert "by closed form" in said[0] and said[4].endswith("%") and said[7].endswith("(seconds by closed form)")
    assert any(line.endswith("(closed form)") for line in said[10:])
    assert why(found).startswith(f"tp {found.best[0].job.layout.tp} x") or "ZeRO-3" in why(found)


def test_what_fits_nowhere_is_said() -> None:
    found = search(llama(Layout(dp=1)), 2, H100, 10 * GIB)
    assert not found.best and found.nearest is not None and found.nearest.memory > 10 * GIB
    assert "No layout fits" in why(found)
    with pytest.raises(Refused, match="no layout divides"):
        search(llama(Layout(dp=1), gbs=7), 37, H100, 70 * GIB)


def test_fewer_devices_than_none() -> None:
    with pytest.raises(Refused, match=r"--gpus -4\n(.|\n)*try: +--gpus 8"):
        run(["--model", "llama3-8b", "--gpus", "-4"])


def test_three_changes_that_fit() -> None:
    job = llama(Layout(1, 4, 2, 1, False, 1), micro=4)
    assert evaluate(job, H100).memory > 70 * GIB
    changes = remedies(job, H100, 70 * GIB)
    assert len(changes) == 3 and all(c.memory <= 70 * GIB for _, c in changes)


@pytest.mark.parametrize(
    ("layout", "gbs", "said"),
    [
        (Layout(16, 1, 2, 1, True, 1), 64, "leave the node"),
        (Layout(1, 8, 1, 1, False, 0), 4, "4 microbatches for 8"),
        (Layout(2, 1, 1, 1, True, 1), 8, "shards nothing"),
        (Layout(2, 1, 2, 1, True, 0), 8, "every rank keeps all masters"),
        (Layout(2, 1, 2, 1, False, 1), 8, "without --sequence-parallel"),
        (Layout(1, 3, 1, 1, False, 0), 8, "32 layers over 3 stages"),
        (Layout(1, 8, 1, 1, False, 0), 16, "idle for 30%"),
        (Layout(1, 1, 32, 1, False, 1, ep=16, etp=1), 32, "tokens leave the node of 8"),
        (Layout(1, 2, 2, 1, False, 3), 8, "weights and gradients of every stage are sent for each of the 4"),
        (Layout(1, 1, 1, 1, False, 1, cp=4), 8, "1024 tokens of a sequence on a rank are too few"),
    ],
)
def test_warnings(layout: Layout, gbs: int, said: str) -> None:
    assert any(said in w for w in warnings(llama(layout, gbs), 8))
    assert not any(said in w for w in warnings(llama(Layout(2, 2, 2, 1, True, 1), 64), 8))


def test_a_long_bubble_is_warned_about() -> None:
    assert not any("idle" in w for w in warnings(llama(Layout(2, 2, 2, 1, True, 1)), 8, 0.05))
    assert any("idle for 25%" in w for w in warnings(llama(Layout(2, 2, 2, 1, True, 1)), 8, 0.25))


def test_train_warns_where_there_are_accelerators_and_of_nonsense_everywhere() -> None:
    config = changed(RunConfig(), tp=16, dp=2, sequence_parallel=True, global_batch_size=64, zero=1)
    assert any("leave the node of 8" in w for w in advice(config, 8, None))
    assert advice(config, 0, None) == [] and advice(changed(config, tp=1, dp=1, zero=0), 8, None) == []
    for leaves, said in (
        ({"tp": 1, "dp": 1}, "--zero 1 with --dp 1 shards nothing"),
        ({"tp": 1, "dp": 1, "zero": 0, "pp": 8, "global_batch_size": 4}, "4 microbatches for 8 pipeline stages"),
        ({"tp": 1, "dp": 1, "zero": 0, "pp": 16}, "16 pipeline stages for 12 layers"),
    ):
        assert [said in w for w in advice(changed(config, **leaves), 0, None)] == [True]


def test_seconds_of_an_encoder_and_a_decoder_are_their_products() -> None:
    """On a device that is as fast as its data sheet says: each block over its own rows, wherever it stands."""
    ideal = Fractions(matmul=1.0, small=0.0, per_layer=0.0)
    place = Place(find("h100"), Stack("ideal", "", fractions={"*/16bit": ideal}))
    config = replace(PRESETS["t5-3b"], max_position_embeddings=512, decoder_seq_length=120, decoder_num_layers=6)
    job = Job(config, Layout(dp=1), 512, 4, 32)
    each, _ = config.multiplications(512)
    peak = place.device.peak("bfloat16")
    for tp in (1, 4):
        cut = job.with_layout(tp=tp, sequence_parallel=tp > 1)
        blocks = units(cut, place).blocks
        for (forward, backward), (matrices, _) in zip(blocks, (each[0], each[-1]), strict=True):
            assert forward.products == pytest.approx(2 * 4 * matrices / peak / tp)
            assert backward.products == pytest.approx(2 * forward.products)
        assert (blocks[0][0].tp > 0) == (tp > 1)
    assert kinds_elements(job)[1] - kinds_elements(job)[0] == 4 * 1024 * 4096  # of cross-attention
    whole = sum(x.products for x in rank_seconds(job, place))
    for layout in ({"pp": 4}, {"pp": 2, "vpp": 2, "schedule": "zbv"}, {"pp": 4, "layer_split": "balanced"}):
        ranks = rank_seconds(job.with_layout(**layout), place)
        assert sum(x.products for x in ranks) == pytest.approx(whole)
    uneven, balanced = (max(x.total for x in rank_seconds(job.with_layout(pp=4, layer_split=split), place))
                        for split in ("even", "balanced"))  # fmt: skip
    assert balanced <= uneven
    slow = step_seconds(job.with_layout(recompute="full"), place)
    assert slow.recompute > 0 and slow.total < 1.4 * step_seconds(job, place).total
    assert step_seconds(replace(job, seq=1024), place).total > 1.5 * step_seconds(job, place).total


# ---- the command -----------------------------------------------------------------------------------------------------


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out


BASE = ("--model", "llama3-8b", "--gpus", "8", "--seq", "4096", "--global-batch", "32")


def test_a_layout_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--tp", "2", "--pp", "2", "--sequence-parallel", "--tokens", "100B")
    text = plan(capsys, *BASE, *layout)
    for word in ("weights", "moments", "activations", "bubble", "tokens/s", "of the peak", "100B tokens", "pp rank 1"):
        assert word in text
    facts = json.loads(plan(capsys, *BASE, *layout, "--json"))
    assert facts["layout"]["dp"] == 2 and facts["memory"]["fits"] and len(facts["memory"]["ranks"]) == 2
    assert facts["time"]["step"] == pytest.approx(sum(facts["time"]["kinds"].values()))
    assert facts["run"]["device_hours"] == pytest.approx(facts["run"]["days"] * 24 * 8)


def test_a_search_writes_a_run_that_train_accepts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    facts = json.loads(plan(capsys, *BASE, "--out", str(path), "--json"))
    assert facts["layouts"] > 50 and facts["best"] and facts["frontier"]
    assert cli.main(["train", "--config", str(path), "--device", "cpu", "--print-config", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    best = facts["best"][0]
    assert {k: config["layout"][k] for k in ("tp", "pp", "dp")} == {k: best[k] for k in ("tp", "pp", "dp")}
    assert config["train"]["micro_batch_size"] == best["micro_batch_size"] and config["model"]["num_layers"] == 32


def test_the_model_of_a_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "llama-tiny"\n[layout]\ntp = 2\ndp = 2\n[train]\nglobal_batch_size = 8\n')
    facts = json.loads(plan(capsys, "--config", str(path), "--gpu", "a100", "--json"))
    assert facts["layout"]["tp"] == 2 and facts["devices"] == 4 and facts["global_batch_size"] == 8


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_scaling(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    rows: list[dict[str, Any]] = json.loads(plan(capsys, *BASE, "--tp", "2", "--scaling", kind, "--json"))["rows"]
    assert [r["devices"] for r in rows][:3] == [8, 16, 32] and rows[0]["efficiency"] == 1.0
    batches = {r["global_batch_size"] for r in rows}
    assert (len(batches) == 1) == (kind == "strong") and rows[-1]["efficiency"] <= 1.001


def test_out_of_memory_names_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "gpt3-175b", "--gpus", "64", "--tp", "8", "--pp", "8", "--micro-batch-size", "4")
    text = plan(capsys, *words, "--global-batch", "1024")
    assert "OUT OF MEMORY" in text and "changes that fit:" in text
    assert len(re.findall(r"^  --\S.* GiB .* s$", text, re.M)) == 3


def test_numbers_of_tokens_as_people_write_them() -> None:
    for text in ("300B", "300b", "0.3T", "300e9", "300E+9", "300_000_000_000", "300,000,000,000", "300000 M", "3e5M"):
        assert amount("--tokens", text) == pytest.approx(3e11), text
    assert [in_words(n) for n in (3e11, 1.5e13, 1.5e12, 2e6, 300)] == ["300B", "15T", "1.5T", "2M", "300"]
    assert amount("--tokens", "0") == 0
    for text in ("", "B", "-3B", "3X", "1e999", "nan", "3BB", "\u0663B"):
        with pytest.raises(Refused, match="300e9"):
            amount("--tokens", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "llama3-8b", "--gpus", "8", "--tokens", "300"), "try:    --tokens 300B"),
        (("--model", "llama3-8b", "--gpus", "8", "--tokens", "many"), "written as 300B, 1.5T, 300e9"),
        (("--model", "llama3-8b", "--gpus", "8", "--tokens", "1e30"), "no run has more than 100000T"),
        (("--model", "llama3-8b", "--gpus", "8", "--tokens", "1e6"), "one step already takes 4,194,304 tokens"),
        (("--model", "llama3-8b", "--gpus", "8", "--tp", "2", "--tokens", "4M"), "--tokens 4194304, or a smaller"),
        (("--model", "llama3-80b", "--gpus", "8"), "the milestones are"),
        (("--model", "llama2-7b"), "neither a number of devices nor a layout"),
        (("--model", "llama3-8b", "--gpus", "9", "--tp", "2"), "which do not divide 9"),
        (("--model", "llama3-8b", "--gpus", "8", "--tp", "2", "--dp", "2"), "= 4 devices"),
        (("--model", "llama3-8b", "--gpus", "8", "--gpu", "h1000"), "the devices are"),
        (("--model", "llama3-8b", "--gpus", "9", "--tp", "3"), "whole heads are dealt"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and "try:" in err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(o.flag in text for o in OWN.values())
