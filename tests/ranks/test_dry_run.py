"""A dry run of one rank says what a real run of all ranks keeps and sends, to the byte."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from isotron import cli
from isotron.config.check import finish
from isotron.config.schema import RunConfig, changed
from isotron.core import comm
from isotron.core import shared_memory as shm
from isotron.core.mesh import Mesh
from isotron.progress import ticking
from isotron.train.dryrun import transport
from isotron.train.dryrun.rank import RankReport, dry, measure, microbatches, passes, rounds
from isotron.train.dryrun.reasons import REASONS
from tests import bert_matrix, matrix, moe_matrix, t5_matrix

ROOT = Path(__file__).resolve().parents[2]
MODELS = {**matrix.MODELS, **moe_matrix.MODELS, **t5_matrix.MODELS, **bert_matrix.MODELS}
EXACT = ("layers", "halves", "parameters", "weights", "gradients", "masters", "moments", "activations", "update")

# what a rank of it keeps and sends does not depend on where tokens go
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2+SP": ("llama", {"tp": 2, "sequence_parallel": True, "recompute": "selective"}),
    "PP2 tied": ("gpt", {"pp": 2}),
    "PP2 x 2 chunks": ("llama-tied", {"pp": 2, "vpp": 2, "recompute": "full"}),
    "PP2 zero bubble, a block cut": ("llama", {"pp": 2, "schedule": "zb-h1", "layers_per_stage": (1.5, 0.5)}),
    "DP2 without ZeRO": ("llama", {"dp": 2, "zero": 0}),
    "DP2 ZeRO-1": ("gpt", {"dp": 2, "zero": 1}),
    "PP2xDP2 ZeRO-2": ("llama", {"pp": 2, "dp": 2, "zero": 2, "max_live_gradients": 20_000}),
    "DP2 ZeRO-3": ("gpt", {"dp": 2, "zero": 3}),
    "DP4 in copies of 2": ("llama", {"dp": 4, "zero": 3, "zero_shard_size": 2}),
    "CP2 ring": ("llama", {"cp": 2}),
    "CP2 heads": ("llama", {"cp": 2, "cp_comm_type": ("a2a",)}),
    "CP2 x PP2, packed rows": ("llama", {"cp": 2, "pp": 2, "reset_attention_mask": True}),
    "experts, TP2": ("groups", {"tp": 2}),
    "latent, PP2": ("mla", {"pp": 2}),
    "words, CP2 x TP2": ("post", {"cp": 2, "tp": 2, "sequence_parallel": True, "short_seq_prob": 0.1}),
    "two streams, TP2 x PP2": ("t5", {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"}),
}


def config_of(name: str, axes: dict[str, Any], dtype: str = "bfloat16", batch: int = 2) -> RunConfig:
    """`batch`: microbatches of a step on a data-parallel rank."""
    layers = MODELS[name].num_layers if name in moe_matrix.MODELS else max(2, axes.get("pp", 1) * axes.get("vpp", 1))
    if name in t5_matrix.MODELS:
        model: Any = replace(MODELS[name], max_position_embeddings=16, decoder_seq_length=12)
    else:
        model = replace(MODELS[name], max_position_embeddings=16, num_layers=layers)
    if name in moe_matrix.MODELS:  # how many tokens a capacity drops is known when there are tokens
        model = replace(model, moe_expert_capacity_factor=0.0)
    base = RunConfig(model=model)
    batch *= axes.get("dp", 1)
    leaves = {"dp": 1, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 9000, **axes}
    usual = {"seq_length": 16, "global_batch_size": batch, "train_iters": 1, "device": "cpu", "dtype": dtype}
    return finish(changed(base, **usual, **leaves))


def real(config: RunConfig) -> RankReport:
    """What this rank of a real run over gloo keeps and sends."""
    os.environ[shm.OFF] = "1"
    rank = dist.get_rank() if dist.is_initialized() else 0
    return measure(config, Mesh(rank, **config.layout.axes), microbatches(config))


def calls(report: RankReport) -> dict[Any, tuple[int, int]]:
    return {key: (sums.count, sums.bytes) for key, sums in report.calls.sums.items()}


# the others run with --slow
QUICK = ("TP2+SP", "DP2 ZeRO-1", "DP2 ZeRO-3", "words, CP2 x TP2", "experts, TP2", "two streams, TP2 x PP2")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_equal_to_a_real_run(ranks: Callable[..., list[Any]], name: str) -> None:
    config = config_of(*CASES[name])
    every = ranks(config.layout.world, real, config)
    for rank in {0, config.layout.world - 1 if config.layout.pp > 1 else 0}:
        alone = dry(config, rank)
        assert {k: getattr(alone, k) for k in EXACT} == {k: getattr(every[rank], k) for k in EXACT}
        assert calls(alone) == calls(every[rank])


def test_tokens_on_their_way_to_experts_are_as_many_as_in_balance(ranks: Callable[..., list[Any]]) -> None:
    config = config_of("groups", {"dp": 2, "ep": 2}, batch=4)
    every, alone = ranks(2, real, config), dry(config, 1)
    assert {k: getattr(alone, k) for k in EXACT[:7]} == {k: getattr(every[1], k) for k in EXACT[:7]}
    seen, assumed = calls(every[1]), calls(alone)
    assert {k: n for k, (n, _) in assumed.items()} == {k: n for k, (n, _) in seen.items()}
    sent = [k for k in assumed if k.file == "core/parallel/all_to_all.py" and k.function == "all_to_all"]
    assert sent and all(assumed[k] == seen[k] for k in set(assumed) - set(sent))
    for k in sent:
        assert assumed[k][1] == pytest.approx(sum(calls(r)[k][1] for r in every) / 2, rel=0.3)


# model, layout, microbatches; the first is always run
ECHOES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("llama-tied", {"pp": 2, "vpp": 2, "recompute": "full"}, 8),
    ("llama", {"tp": 2, "sequence_parallel": True, "recompute": "selective"}, 6),
    ("llama", {"pp": 4}, 9),
    ("llama", {"pp": 2, "schedule": "gpipe"}, 5),
    ("gpt", {"pp": 2, "dp": 2}, 8),
    ("llama", {"pp": 2, "cp": 2}, 7),
    ("groups", {"tp": 2}, 6),
    ("groups", {"dp": 2, "ep": 2}, 5),
    ("mla", {"pp": 2}, 6),
)


@pytest.mark.parametrize(
    ("model", "axes", "batch"), [ECHOES[0], *(pytest.param(*e, marks=pytest.mark.slow) for e in ECHOES[1:])]
)
def test_echoes_do_what_microbatches_do(model: str, axes: dict[str, Any], batch: int) -> None:
    """To the byte and the call, on every pipeline rank."""
    config = config_of(model, axes, batch=batch)
    for rank in range(0, config.layout.world, config.layout.world // config.layout.pp):
        ticks: list[int] = []
        echoed = dry(config, rank, lambda: ticks.append(1))  # noqa: B023
        assert len(ticks) == passes(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("isotron.train.dryrun.rank.can_echo", lambda config: False)
            patch.setattr("isotron.train.dryrun.rank.ROUNDS", 99)
            computed = dry(config, rank)
        assert (echoed.microbatches, computed.microbatches) == ((batch, 3), (batch, batch))
        assert calls(echoed) == calls(computed)
        assert {k: getattr(echoed, k) for k in EXACT} == {k: getattr(computed, k) for k in EXACT}


SLOW = ({"dp": 2, "zero": 3},)


@pytest.mark.parametrize(
    "axes", [{"pp": 2, "schedule": "zb-h1"}, *(pytest.param(a, marks=pytest.mark.slow) for a in SLOW)]
)
def test_rounds_that_are_not_run_are_counted(axes: dict[str, Any]) -> None:
    whole = config_of("llama-tied", axes, batch=8)
    run, one, more = rounds(whole)
    assert more and run + one * more == microbatches(whole)
    ticks: list[int] = []
    short = dry(whole, 0, lambda: ticks.append(1))
    assert len(ticks) == passes(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotron.train.dryrun.rank.ROUNDS", 99)
        full = dry(whole, 0)
    assert full.microbatches == (microbatches(whole),) * 2 and short.microbatches[1] == run
    assert calls(short) == calls(full)
    assert {k: getattr(short, k) for k in EXACT} == {k: getattr(full, k) for k in EXACT}


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_goes_to_each_rank_by_itself_may_be_left_out(zero: int) -> None:
    config = config_of("gpt", {"dp": 8, "zero": zero, "tp": 2})
    less = dry(config, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_gathered", comm.start_gather_flat)
        patch.setattr(transport, "_summed", lambda real: real)
        whole = dry(config, 5)
    assert {k: getattr(less, k) for k in EXACT} == {k: getattr(whole, k) for k in EXACT}
    assert calls(less) == calls(whole)


def test_long_work_says_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every ten seconds where nobody sits at a terminal, and nothing of short work."""
    clock = iter((0.0, 4.0, 8.0, 12.0, 16.0, 24.0))
    monkeypatch.setattr("isotron.progress.time.monotonic", lambda: next(clock))
    with ticking("dry run", 5) as tick:
        for _ in range(5):
            tick()
    assert capsys.readouterr().err.splitlines() == ["dry run  60.0%  8 s left", "dry run 100.0%  0 s left"]


def test_every_call_of_the_core_has_its_reason() -> None:
    found = set()
    for path in (p for room in ("parallel", "optim", "nn") for p in (ROOT / "isotron/core" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = node.func.value, node.func.attr
                if isinstance(owner, ast.Name) and owner.id == "comm" and name not in ("done", "Pending"):
                    found.add((name.removeprefix("start_"), str(path.relative_to(ROOT / "isotron"))))
    assert found == set(REASONS)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--dry-run", "--config", str(ROOT / "configs/tiny.toml"), "--tp", "2", "--pp", "2"]
    words += ["--zero", "1", "--global-batch-size", "32", "--layers-per-stage", "2.5,1.5"]
    assert cli.main([*words, "--dry-run-world", "64"]) == 0
    text = capsys.readouterr().out
    assert text.count("0-1 2 (attention)") == 2 and "  2 (mlp) 3\n" in text
    assert "tp 2 x pp 2 x dp 16 = 64 ranks" in text and "activations to the next stage" in text
    assert cli.main([*words, "--dry-run-world", "64", "--dry-run-rank", "63", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rank"]["coordinate"] == {"tp": 1, "cp": 0, "dp": 15, "pp": 1} and found["rank"]["layers"] == [2, 3]
    assert found["rank"]["halves"] == ["mlp", ""]
    assert found["rank"]["states"] == sum(found["rank"][k] for k in ("weights", "gradients", "masters", "moments"))
    assert all(c["reason"] and c["count"] > 0 for c in found["calls"])


def test_a_rank_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--dry-run", "--config", str(ROOT / "configs/tiny.toml"), "--dry-run-rank", "1"]
    assert cli.main(words) == 2
    assert "the layout has ranks 0 to 0" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--optimizer", "muon"], ["--param-groups", "layers.*:optimizer=adafactor"]])
def test_rules_that_ask_other_ranks(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    base = ["train", "--dry-run", "--config", str(ROOT / "configs/tiny.toml"), *words]
    assert cli.main([*base, "--tp", "2"]) == 2
    assert "a dry run has one of them" in capsys.readouterr().err
    assert cli.main([*base, "--pp", "2", "--global-batch-size", "4"]) == 0


def test_a_checkpoint_says_which_model_is_planned(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path / "hf")
    words = ["train", "--dry-run", "--json", "--seq-length", "16", "--micro-batch-size", "1", "--load"]
    assert cli.main([*words, str(tmp_path / "hf")]) == 0
    assert json.loads(capsys.readouterr().out)["rank"]["layers"] == [0, 1, 2]
    assert cli.main([*words, str(tmp_path / "elsewhere"), "--num-layers", "2"]) == 0  # a cluster's path, say
    said = capsys.readouterr()
    assert json.loads(said.out)["rank"]["layers"] == [0, 1] and "cannot be read here" in said.err
    assert cli.main([*words, str(tmp_path / "elsewhere")]) == 2 and "no such directory" in capsys.readouterr().err
